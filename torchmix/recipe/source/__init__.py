"""What a recipe says of one source. Files in reading order:

documents.py       which rows are used, and how a split cuts them
bad_rows.py        what becomes of rows that cannot be read
resets.py          where documents end inside rows
format.py          what its files are
properties.py      which properties its rows have
image_structs.py   images in texts, as values
images.py          images in texts: checks, and what of it decides tokens
layout_structs.py  chats, lists of texts and images, masks of loss, as values
chat.py            the same: checks, templates by name, and what of it decides tokens
tokenizer_kind.py  what kind of tokenizer it names
row_map.py         which function its rows go through, and whether their ids are kept
"""
