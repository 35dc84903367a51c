"""Sources whose rows are more than a text or ids: with images, turns, or masks of loss. Files in reading order:

item_kinds.py  the kinds of items in the catalog that these sources have
text.py        texts, lists of texts and images, and chats, as a source
roles.py       the roles of a chat whose messages are structs of a file
look.py        what seems to be conversations in a file that nobody has described
loss_mask.py   ids with a column that says which of them have loss
"""
