"""Loaders and index shards on a Ray cluster. Files in reading order; these alone import ray, when they are used:

connect.py  the cluster
actor.py    what Ray runs on a node
seats.py    loaders as actors
main.py     the process that keeps the loaders of a job
keeper.py   that process, as the job's first rank sees it
shards.py   shards of an index as tasks
"""
