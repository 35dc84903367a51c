"""The rows that a stream draws from. Files in reading order:

space.py   the seam: units of rows, their lengths, and where they lie; and the space of one source
view.py    a source of which only some rows are kept
flat.py    several spaces end to end
rest.py    some rows of a space, numbered without gaps
"""
