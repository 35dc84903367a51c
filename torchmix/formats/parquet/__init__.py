"""Parquet. In reading order:

thrift.py  Thrift's compact encoding, as far as Parquet's footers and page headers use it
footer.py  a Parquet file's footer -> one column's leaf, its chunks, and where their data pages lie
page.py    bytes of data pages -> an Arrow array, by pyarrow's own decoder
values.py  bytes of pages of integers and of token lists -> their tokens, without making lists
scan.py    a column chunk -> its pages with their rows, and the tokens of each row
source.py  the Parquet source: one column of token lists, or of text, read page by page
"""
