"""WebDataset: samples as consecutive members of tar files. In reading order:

members.py  a tar file -> its members and the samples that they make, without unpacking
source.py   the source of WebDataset shards: one member of each sample, read by its offset
"""
