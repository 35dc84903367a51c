"""Rows of several parts -> documents. In reading order:

row_parts.py      what a row is cut into, before it becomes a document: texts, and places of items
chat.py           a conversation -> the parts of its document, by a template of the recipe
chat_template.py  the same, by the template of a model's folder, a program in Jinja's language
layout.py         parts of rows, and sizes of their items -> tokens in which each item has its places
"""
