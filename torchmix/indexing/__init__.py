"""Files -> their catalog. In reading order:

file_changes.py    which files of a source are new, changed or gone, and what an index run says and refuses of them
measure_rows.py    lengths of rows that must be encoded, measured by encoding them: a second pass over a file whose
                   pages are known
scan_files.py      files -> their indexes, many at once
deny_lists.py      Deny-lists -> the rows of each source that they name
properties.py      what a recipe says of rows -> properties and views of its catalog
source_work.py     sources as they are to be, against the catalog before -> the files to scan, and those of one shard
scan.py            sources -> their catalog: find files, scan what is new, publish
add_properties.py  a table of further properties -> the catalog of a recipe
"""
