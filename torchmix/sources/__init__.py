"""How bytes are read. Files in reading order:

random_access.py    a file as ranges of bytes
file_status.py      what the kernel says of a file: whether it was written to
source.py           what every kind of source gives: scans of files, documents of pages
stores.py           a URI -> the store that holds it
store_errors.py     which errors of a store pass
store_file.py       an object of a store as a file
read_ahead.py       a file of a store, by large ranges
open_path.py        a path or URI -> an open file
find_objects.py     globs of URIs -> objects
find_files.py       paths, URIs and globs -> files
thrift.py           the compact encoding of Parquet's headers and footers
parquet_footer.py   a Parquet file's footer -> one column's chunks
parquet_layout.py   a chunk -> its pages
parquet_page.py     bytes of pages -> an Arrow array, by a Parquet file in memory
parquet_levels.py   levels -> where rows begin, and which hold nothing
parquet_plain.py    pages of integers alone -> arrays, by a Parquet file in memory
parquet_values.py   bytes of pages of token lists -> the tokens alone
parquet_column.py   an Arrow array -> documents
parquet_scan.py     a chunk -> its pages with their rows, and the tokens of each row
parquet.py          the Parquet source: a column of token lists or of text
indexed_files.py    Megatron's prefixes, and globs of them -> pairs of files
indexed_header.py   the head of a .idx: what the pair holds
indexed_documents.py  sequences -> documents and their pages
indexed.py          the source of Megatron's .bin and .idx
file_ends.py        the identity of a file without a footer
frames.py           gzip members and zstd frames: where they lie, what they hold
jsonl_lines.py      lines of JSON -> one key of each, as an Arrow array
jsonl_pages.py      a file of JSON lines -> its pages
jsonl.py            the source of JSON lines
arrow_message.py    metadata of Arrow's messages: where the buffers of a batch lie
arrow_layout.py     a column's buffers among them -> an Arrow array
arrow_slices.py     rows of a batch that can be read alone
arrow_page.py       bytes of a page of an Arrow file -> an Arrow array
arrow_batches.py    an Arrow file or stream -> the messages of its batches
arrow_column.py     a column's name -> the column
arrow_scan.py       batches -> pages
arrow_file.py       the source of Arrow files
reframe.py          a compressed file -> the same content in small frames
formats.py          which source reads which files
file_changes.py     which files are known, new, changed, moved or gone
scan_files.py       files -> their shares of the catalog, many at once
scan.py             a recipe -> its catalog
page_cache.py       what was read lately, within a budget of bytes
open_objects.py     bytes of objects in stores, checked against the catalog
open_files.py       bytes of files, checked against the catalog
range_requests.py   byte ranges of objects -> few requests, several at once
mapped_files.py     files whose tokens lie in them as they are, as memory
decoded_page.py     documents of a run -> its pages, as they are kept
page_batches.py     pages -> runs and batches, which are decoded together
source_pages.py     pages -> documents
coming_pages.py     pages whose bytes are on their way
page_starts.py      the pages of all sources in one sorted table
locate.py           pieces -> their pages, and where in mapped files they begin
piece_copy.py       pieces -> their places
page_runs.py        pieces of pages that must be decoded -> what is copied from each
reader.py           pieces of documents -> tokens
"""
