"""Sources with images in their texts. Files in reading order:

headers.py  images of a file, as their column is scanned
column.py   the column of images, as a source of its own
tables.py   the images of each file, from the catalog
look.py     what seems to be images in a file that nobody has described
"""
