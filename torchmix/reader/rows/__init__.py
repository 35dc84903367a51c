"""Rows that must be encoded to become tokens: of a step only those that it asks for. Files in reading order:

kept_ids.py     ids of documents that steps draw piece by piece
call_rows.py    pieces of one call -> the rows to encode, and what the pages hold of them
row_encoding.py rows of one call -> ids, each row once, in few batches
"""
