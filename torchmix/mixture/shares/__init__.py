"""Shares of the streams: of a tree, over training, in proportion to sizes, or of cells. Files in reading order:

integers.py  exact shares -> integers that sum to 2^32
tree.py      a tree of groups -> the share of each stream
schedule.py  shares over training -> the shares of a step
powers.py    sizes -> shares in proportion to a power of them
cells.py     shares of several properties -> shares of the cells where they meet
"""
