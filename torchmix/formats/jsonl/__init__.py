"""JSON lines. Files in reading order:

frames.py      gzip members and zstd frames: where they lie, what they hold
surrogates.py  halves of surrogate pairs -> U+FFFD
lines.py       lines of JSON -> one key of each, as an Arrow array
pages.py       a file of JSON lines -> its pages
properties.py  other keys of a file
look.py        a file -> the keys that one may train on
source.py      the source of JSON lines
reframe.py     a compressed file -> the same content in small frames
"""
