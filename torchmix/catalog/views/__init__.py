"""Views: rows of a source that have a share of their own. Files in reading order:

wanted.py    a part of a recipe -> the views that it needs
folders.py   paths of files below the folder that a source's files share
cuts.py      `split_by` -> which child each row is of
cells.py     shares of several properties -> which cell each row is in
hold_out.py  which rows lie in a band of hashes
build.py     the rows of each view
entries.py   the rows of views -> what the catalog says of them
earlier.py   the rows that sources and views had before
"""
