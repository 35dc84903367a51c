"""How bytes are read. Files in reading order:

source.py           what every kind of source gives: scans of files, documents of pages
thrift.py           the compact encoding of Parquet's headers and footers
parquet_layout.py   a Parquet file's footer -> column chunks -> pages
parquet_page.py     bytes of pages -> an Arrow array, by a Parquet file in memory
parquet.py          the Parquet source: a column of token lists or of text
"""
