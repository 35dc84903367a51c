"""What the processes of a user's runs show of themselves, to `torchmix top` and `torchmix doctor`. In reading order:

board.py           what one process shows
find.py            the boards of this machine, and what the kernel says of their processes
socket_folders.py  where processes of a run meet, and such folders of dead runs
leftovers.py       what dead runs have left behind
last_words.py      the last warnings of a process
"""
