"""documents -> tensors.

In reading order:

    arrays.py             the arrays of a step, without torch
    memory.py             memory for steps, reused once nothing refers to it
    ramps.py              a flat array, filled range by range with ramps
    spans.py              where positions restart and sources change
    resets.py             pieces cut where a token inside a document ends one
    boundaries.py         cu_seqlens and cu_seqlens_padded
    modules/              what each rank computes of a module, and where its rows go            (one file: torch)
    build.py              StepPlan + documents -> the arrays of one replica
    row_arrays.py         lists of numbers that maps give beside ids
    joined_steps.py       several steps of a replica as one, and cut again
    expand.py             a step's arrays -> ids, masks, positions and sources                (torch)
    row_batch.py          the same as tensors of a microbatch                                      (torch)
    fields.py             the tensors of a step and of a microbatch, as the trainer sees them   (torch)
    context_parallel.py   the share of each role: the fields of its stage, its zigzag slice     (torch)
"""
