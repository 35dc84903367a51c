"""Row -> sample. Files in reading order:

bytes_tokenizer.py   text -> the ids of its UTF-8 bytes, and one that ends the document
"""
