"""documents -> tensors.

In reading order:

    fields.py             the tensors of a step and of a microbatch, as the trainer sees them
    memory.py             memory of steps, used again once nobody refers to it
    ranges.py             ranges of a flat array, copied end to end
    ramps.py              positions, sources and indices, filled in place
    boundaries.py         cu_seqlens and cu_seqlens_padded
    build.py              StepPlan + documents -> the microbatches of one replica
    context_parallel.py   the share of each role: its stage's fields, its zigzag slice
"""
