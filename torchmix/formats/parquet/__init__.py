"""Parquet. Files in reading order:

thrift.py  the compact encoding of headers and footers
footer.py  a file's footer -> the chunks of one column
layout.py  a chunk -> its pages
page.py    bytes of pages -> an Arrow array, by a Parquet file in memory
levels.py  levels -> where rows begin, and which hold nothing
plain.py   pages of integers alone -> arrays, by a Parquet file in memory
values.py  bytes of pages of token lists -> the tokens alone
scan.py    a chunk -> its pages with their rows, and the tokens of each row
properties.py  other columns of a file
look.py    a file -> the columns that one may train on
source.py  the Parquet source: a column of token lists or of text
"""
