"""Loaders and index shards on a Ray cluster. Files in reading order; these alone import ray, when they are used:

connect.py  the cluster
seats.py    loaders as actors
shards.py   shards of an index as tasks
"""
