"""What data exists. In reading order:

page_table.py   where the pages of a source lie: a struct of arrays, memory-mapped from the catalog
sizes.py        sizes of the documents of a source, and of the items inside them: all that planning needs to know of
                the data
settings.py     the settings of sources that a catalog is built for and opened with
array_files.py  arrays on disk: one file for the arrays of a source, or of many small ones; the manifest holds sizes
                and checksums
in_store.py     a catalog in a store: its copy on this host, and what is published from there
manifest.py     the manifest: all that a catalog knows except its arrays, as one JSON file that a person can read
store.py        the open catalog: which data exists, in which order, with sizes ready for planning
earlier.py      rows that a source or a view had before files were added or other rows were chosen
file_index.py   the index of one data file: the result of its scan, kept until the whole catalog is published
properties.py   properties of rows: their files, the tables that join them, and SQL over them
publish.py      writing the catalog: arrays in fresh files, then the manifest in one step
views.py        the rows of a source that a selection, a cell, a child of a split or a hold-out keeps
"""
