"""Ranges of bytes: files of this machine, and objects of stores. Files in reading order:

random_access.py  a file as ranges of bytes
byte_stream.py    a file as a stream of Python's
file_status.py    what the kernel says of a file: whether it was written to
file_ends.py      the identity of a file without a footer
stores.py         a URI -> the store that holds it
store_errors.py   which errors of a store pass
store_file.py     an object of a store as a file
read_ahead.py     a file of a store, by large ranges
open_path.py      a path or URI -> an open file
find_objects.py   globs of URIs -> objects
find_files.py     paths, URIs and globs -> files
"""
