"""Kinds of items in rows: what lies between the bytes of an item and the arrays of a step. In reading order:

modality.py  the seam: what storage, formats, readers and steps ask of a kind of items
images/      images
table.py     the table of kinds
"""
