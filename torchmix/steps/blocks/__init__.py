"""Several small steps at a time, which cost less than one by one. In reading order:

plan_blocks.py  which steps are planned together
read_blocks.py  the pieces of several steps and replicas, asked for at once
"""
