"""Streams whose rows were edited in the middle of a run. Files in reading order:

records.py   what is remembered of an edit
versions.py  the rows that streams had before and have after
replay.py    edits -> the windows of the epochs that they fell into
orders.py    the orders of a planner, made to follow edits
"""
