"""JSON lines. In reading order:

frames.py  frames of compressed files: gzip members and zstd frames, each of which decompresses by itself
lines.py   lines of JSON -> one key of each, as an Arrow array; and the pages that lines are read by
source.py  the source of JSON lines: one key of each line, read by pages of about 64 KiB
"""
