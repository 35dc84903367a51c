"""Pieces of documents: where they lie, and how they come to their places. Files in reading order:

page_starts.py     the pages of all sources in one sorted table
locate.py          pieces -> their pages, and where in mapped files they begin
piece_copy.py      pieces -> their places
open_documents.py  what is left of documents that steps draw piece by piece
id_check.py        ids that the index has not seen, as they are read
unlabelled.py      tokens whose label stands for an image
page_runs.py       pieces -> what is copied from mapped files, and from each page
"""
