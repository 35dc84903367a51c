"""What a process reads itself, in the place of loaders or before it asks them. Files in reading order:

cpu_share.py       how much of the reading of a node its own processors take
read_both.py       what this process and loaders read at once, and how it is joined
node_first.py      the node reads, and loaders what its processors have no time for
by_source.py       some sources are read here, and the others by loaders
fleet_or_files.py  loaders read, and the node only when none answers
"""
