"""What data exists. Files in reading order:

bad_rows.py      rows that could not be read when they were indexed
first_rows.py    where pages begin, in rows, from 4 bytes a page
items.py         other sizes, and items inside documents, by named columns
sizes.py         tokens of each document, rows of each page: all that planning needs
settings.py      what sources are indexed and opened for
page_table.py    where pages lie in files
file_table.py    the page table of one file, from its scan
lock.py          one writer at a time
array_files.py   arrays on disk, each with its size and checksum
manifest.py      everything else on disk: one JSON file
denied/          rows that deny-lists name
kept_manifests.py manifests that runs had
store.py         sources, open; fingerprints
open_part.py     a part of a recipe with its views
vocabulary.py    ids of sources against those that the model has
parts.py         what is kept of a scanned file until it is published
publish.py       fresh arrays, then the manifest in one step
"""
