"""What the files of each format say, and how their pages become documents. Files in reading order:

placed.py      images whose places in a list of texts stand beside them
seen_ids.py    token ids of rows -> the smallest, the largest, and what no model has
seen_lists.py  lists of rows that a map gives beside ids -> the most bytes of them
source.py      the seam: what every format gives: scans of files, documents of pages
checksum.py    checksums of parts -> of the whole
decompress.py  compressed bytes -> as many as they should be
array_rows.py  rows of an Arrow array, by what they hold
column.py      an Arrow array -> documents
column_source.py  what sources of one column share
found_column.py  what a look at a file finds
good_rows.py   the same where some rows cannot be read

Then a folder each: parquet/, megatron/, jsonl/, arrow/, webdataset/; kept_ids/, which index runs write; and for any
of them images/, and documents/, of rows that are more than a text or ids.

table.py       which format reads which files
"""
