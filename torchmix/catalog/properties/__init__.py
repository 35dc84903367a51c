"""Properties of documents, and selections by them. Files in reading order:

database.py    a database in memory that reaches nothing outside of it
expression.py  the `where` of a selection -> the rows it keeps
files.py       tables on disk
side_tables.py tables that are joined by id
rows.py        all rows of a source, with their properties
query.py       SQL over these rows
"""
