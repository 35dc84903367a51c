"""Properties of documents, and selections by them. Files in reading order:

database.py    a database in memory that reaches nothing outside of it
expression.py  the `where` of a selection -> the rows it keeps
"""
