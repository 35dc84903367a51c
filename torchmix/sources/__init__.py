"""How bytes are read. Files in reading order:

source.py           what every kind of source gives: scans of files, documents of pages
find_files.py       paths and globs -> files
thrift.py           the compact encoding of Parquet's headers and footers
parquet_footer.py   a Parquet file's footer -> one column's chunks
parquet_layout.py   a chunk -> its pages
parquet_page.py     bytes of pages -> an Arrow array, by a Parquet file in memory
parquet_column.py   an Arrow array -> documents
parquet.py          the Parquet source: a column of token lists or of text
indexed_files.py    Megatron's prefixes, and globs of them -> pairs of files
indexed_header.py   the head of a .idx: what the pair holds
indexed_documents.py  sequences -> documents and their pages
indexed.py          the source of Megatron's .bin and .idx
frames.py           gzip members and zstd frames: where they lie, what they hold
jsonl_lines.py      lines of JSON -> one key of each, as an Arrow array
jsonl_pages.py      a file of JSON lines -> its pages
jsonl.py            the source of JSON lines
reframe.py          a compressed file -> the same content in small frames
formats.py          which source reads which files
file_changes.py     which files are known, new, changed, moved or gone
scan_files.py       files -> their shares of the catalog, many at once
scan.py             a recipe -> its catalog
page_cache.py       what was read lately, within a budget of bytes
open_files.py       bytes of files, checked against the catalog
mapped_files.py     files whose tokens lie in them as they are, as memory
source_pages.py     pages -> documents
piece_copy.py       pieces of pages -> their places
reader.py           pieces of documents -> tokens
"""
