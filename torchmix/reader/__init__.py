"""Pieces of documents -> tokens. In reading order:

protocol.py        what the making of steps asks of a reader, and what it gets
open_files.py      bytes of indexed files and objects: opened when needed, checked against the catalog, read at offsets
page_cache.py      decoded pages that are kept, with the memory that they take, and how often they were decoded
mapped_files.py    files whose tokens lie in them as they are: memory-mapped, so that a page costs nothing to keep
source_pages.py    pages of one source, decoded: bytes of runs of pages -> one `DecodedPage` each
page_store.py      pages of all sources by one number: kept, on their way from a store, or decoded now
locate.py          pieces of documents -> the pages they lie in; and, where files are mapped, the tokens of the file
open_documents.py  the rests of documents that steps draw piece by piece, kept outside the page cache
piece_copy.py      pieces of documents -> their places in one array, or tokens and labels in the memory of steps
row_encoding.py    rows of one call -> their ids, each row once, in few batches
reader.py          pieces of documents -> their tokens, each page read and decoded once while it is kept
items.py           items of sources -> their bytes, or their units where a loader decodes for others
"""
