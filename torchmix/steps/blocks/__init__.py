"""Several small steps at a time, which cost less than one by one. In reading order:

plan_blocks.py  which steps are planned together
one_ahead.py    the next item, made while the present one is used
read_blocks.py  the pieces of several steps and replicas, asked for at once
joined_build.py  the steps of a replica in a block, built at once
read_steps.py   steps with their tokens, ready to be built
"""
