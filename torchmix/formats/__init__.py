"""What the files of each format say, and how their pages become documents. Files in reading order:

seen_ids.py    token ids of rows -> the smallest, the largest, and what no model has
source.py      the seam: what every format gives: scans of files, documents of pages
checksum.py    checksums of parts -> of the whole
decompress.py  compressed bytes -> as many as they should be
column.py      an Arrow array -> documents
found_column.py  what a look at a file finds
good_rows.py   the same where some rows cannot be read

Then a folder each: parquet/, megatron/, jsonl/, arrow/, webdataset/; kept_ids/, which index runs write; and images/, of
texts with images in any of them.

table.py       which format reads which files
"""
