"""Rows of several parts -> documents. Files in reading order:

row_parts.py    what a row is cut into: texts, ids between them, places of images
marked.py       a text with markers for images -> its parts
interleaved.py  a list of texts and images -> its parts
chat.py         a conversation -> its parts, by a template
open_chat.py    the recipe's words for chat -> a template
lay_out.py      parts -> ids, places of images, and runs of tokens without loss
open_layout.py  the recipe's words for a source -> how its rows become documents
loss_flags.py   a column that says which tokens have loss -> runs without
"""
