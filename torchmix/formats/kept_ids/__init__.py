"""Ids that an index run has kept of texts, read in the place of the texts. Files in reading order:

ids_file.py    ids of one data file on disk, with a checksum for each page
source.py      ids of a page, as the seam of formats wants them
in_place_of.py a source of texts -> the same source over the ids that were kept of it
"""
