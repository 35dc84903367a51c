"""Megatron's .bin and .idx. Files in reading order:

files.py      prefixes, and globs of them -> pairs of files
header.py     the head of a .idx: what the pair holds
documents.py  sequences -> documents and their pages
look.py       a dataset -> what one may train on
source.py     the source of Megatron's datasets
"""
