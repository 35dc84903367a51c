"""What the processes of a user's runs show of themselves, to `torchmix top` and `torchmix doctor`. In reading order:

board.py      what one process shows
find.py       the boards of this machine, and what the kernel says of their processes
leftovers.py  what dead runs have left behind
"""
