"""What data exists. Files in reading order:

sizes.py         tokens of each document, rows of each page: all that planning needs
page_table.py    where pages lie in files
lock.py          one writer at a time
array_files.py   arrays on disk, each with its size and checksum
manifest.py      everything else on disk: one JSON file
store.py         a recipe's sources, open; fingerprints
parts.py         what is kept of a scanned file until it is published
publish.py       fresh arrays, then the manifest in one step
"""
