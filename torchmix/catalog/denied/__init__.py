"""Rows that deny-lists name. Files in reading order:

opened.py    what the catalog says of them, opened
entries.py   rows -> what the catalog says of them
"""
