"""Row -> sample. In reading order:

tokenizer.py             what every tokenizer and every encoder of rows gives: tokens, how many they are, and text
                         again
bytes_tokenizer.py       text -> tokens without a vocabulary file: the UTF-8 bytes of a document are its ids, and 256
                         ends it
vocabulary_tokenizer.py  vocabularies of Hugging Face's `tokenizers` and of tiktoken -> tokenizers
fim.py                   fill in the middle: a tokenizer whose texts are, at a rate, cut in three
maps.py                  `module:function` in a recipe -> the function, and an encoder of the rows that it gives
open_tokenizer.py        the recipe's words for a tokenizer -> the tokenizer, each opened once
documents/               rows of several parts -> documents
"""
