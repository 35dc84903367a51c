"""Row -> sample. Files in reading order:

tokenizer.py            what every tokenizer gives: tokens of texts, their lengths alone, and text again
bytes_tokenizer.py      text -> the ids of its UTF-8 bytes, and one that ends the document
text_batches.py         an Arrow array -> Python strings, a bounded number at a time
encoder.py              what a vocabulary gives, and what is tried on it to know it again
huggingface.py          a vocabulary in a tokenizer.json
tiktoken_encoding.py    a vocabulary of tiktoken, by name
vocabulary_tokenizer.py a vocabulary and the ids around a document -> a tokenizer
row_encoder.py          rows as a file holds them -> tokens
maps/                   functions of the user's over rows
open_tokenizer.py       the recipe's words -> a tokenizer
images/                 images -> their sizes, and their patches
"""
