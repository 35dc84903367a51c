"""A plan on disk, and steps made from it. Files in reading order:

tables.py    the columns of a plan's files
manifest.py  what a plan on disk is of: plan.json
write.py     plans of steps -> files
read.py      files -> plans of steps, placed for any layout
"""
