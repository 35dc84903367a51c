"""documents -> tensors.

In reading order:

    arrays.py             the arrays of a step, without torch
    memory.py             memory of steps, used again once nobody refers to it
    ramps.py              a flat array, filled range by range with ramps
    spans.py              where positions restart and sources change
    resets.py             pieces cut where a token inside a document ends one
    boundaries.py         cu_seqlens and cu_seqlens_padded
    build.py              StepPlan + documents -> the arrays of one replica
    expand.py             ids, masks, positions and sources, made of what a step holds        (torch)
    fields.py             the tensors of a step and of a microbatch, as the trainer sees them   (torch)
    context_parallel.py   the share of each role: its stage's fields, its zigzag slice          (torch)
"""
