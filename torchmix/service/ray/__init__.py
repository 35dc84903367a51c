"""Loaders and index shards on a Ray cluster. In reading order:

shards.py  shards of an index as tasks of a Ray cluster
seats.py   loaders as actors of a Ray cluster
main.py    what runs in the process that keeps the loaders of a job on a Ray cluster
keeper.py  the process that keeps a job's loaders on Ray, as the ranks of the job see it
"""
