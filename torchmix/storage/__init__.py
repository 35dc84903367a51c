"""Ranges of bytes: files of this machine, and objects of stores. In reading order:

stores.py         object stores: a URI -> the file system that holds it
random_access.py  a file as ranges of bytes: what every format is read from, wherever the file lies; and how a scan
                  reads a file of a store, by large ranges that are asked for ahead
store_file.py     an object of a store: any range of it, tried again while the store fails; listed, written and deleted.
                  And any path or URI, opened
find_files.py     the data files of a source: paths, URIs and globs of the recipe -> paths and URIs of files
"""
