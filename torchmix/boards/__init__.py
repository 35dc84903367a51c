"""What the processes of a user's runs show of themselves, to `torchmix top` and `torchmix doctor`. In reading order:

board.py           what a process shows of itself: a page of memory that other processes of its user can read, and
                   figures in the forms that monitoring programs read
socket_folders.py  folders in which processes of a run meet, made so that those of dead runs can be told from living
                   ones
find.py            the boards of this machine, what the kernel says of their processes, and what dead runs have left
"""
