"""Pieces of documents -> tokens. Files in reading order:

decoders.py        how each source is read
open_objects.py    bytes of objects in stores, checked against the catalog
open_files.py      bytes of files, checked against the catalog
range_requests.py  byte ranges of objects -> few requests, several at once
mapped_files.py    files whose tokens lie in them as they are, as memory
decoded_page.py    documents of a run -> its pages, as they are kept
page_cache.py      what was read lately, within a budget of bytes
decode_count.py    how much is decoded, and how often
page_batches.py    pages -> runs and batches, which are decoded together
source_pages.py    pages -> documents
used_rows.py       the rows of pages that are used at all
coming_pages.py    pages whose bytes are on their way
page_store.py      pages of all sources: kept, on their way, or decoded now
protocol.py        what the making of steps asks of a reader
reader.py          pieces of documents -> tokens

Then images/: images of sources -> their bytes, or their patches. And pieces/: where pieces lie, and how they come to
their places; rows/: rows that must be encoded to become tokens.
"""
