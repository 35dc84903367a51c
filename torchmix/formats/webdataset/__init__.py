"""WebDataset: samples as consecutive members of tar files. Files in reading order:

members.py  a tar file -> its members, and the samples that they make
beside.py   an index of DALI's or Energon's beside a shard -> its samples
value.py    a member -> the text, or bytes, that a source reads of it
look.py     what one might train on
source.py   the source: a sample is a row, and a member of it a page
"""
