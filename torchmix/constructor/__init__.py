"""documents -> tensors. In reading order:

arrays.py   the numpy arrays of a replica's steps, and the memory that they lie in
spans.py    where documents end in the tokens of a step: restarts of positions, spans of sources, cu_seqlens
runs.py     runs of ranks -> what each rank of a replica has of its bins
modules.py  what the ranks of a replica get of its modules, and the road of every row that a module gives
build.py    the plans of a block + documents -> the microbatches of replicas, at full length
fields.py   the tensors of one step and of one microbatch, as the trainer sees them
"""
