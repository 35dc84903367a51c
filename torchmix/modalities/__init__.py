"""Kinds of items in rows: what lies between the bytes of an item and the arrays of a step. In reading order:

pictures.py  what kinds that show pictures share: sizes in blocks, and patches
modality.py  the seam: what storage, formats, readers and steps ask of a kind of items
table.py     the table of kinds

Each kind has a folder with what is of it alone, and nothing but the table imports it.
"""
