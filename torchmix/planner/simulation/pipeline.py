"""1F1B: how long a pipeline takes for microbatches of unlike cost.

In: the forward cost of each microbatch, and the number of stages. Out: the time until the last backward ends. Must
hold: a stage computes one thing at a time, in the order of the schedule, as soon as what it needs is there; sending
costs nothing. Cost: one array operation for each forward and backward of each stage, over all pipelines at once.

Source: the non-interleaved schedule of Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BACKWARD = 2.0
"""Time of a backward pass over that of its forward pass."""


def pipeline_time(forward: NDArray[np.float64], stages: int) -> NDArray[np.float64]:
    """Time of each of n pipelines.

    Args:
        forward: [n, m] cost of the forward pass of each microbatch, of all stages together; each takes an equal part.
        stages: Of each pipeline, 1 or more.

    Returns:
        [n] in the unit of `forward`.
    """
    num_pipelines, num_microbatches = forward.shape
    part = forward.T / stages
    free = np.zeros((stages, num_pipelines))
    forward_end = np.zeros((stages, num_microbatches, num_pipelines))
    backward_end = np.zeros((stages, num_microbatches, num_pipelines))
    for stage, microbatch, is_backward in schedule_1f1b(stages, num_microbatches):
        if is_backward:
            last = stage == stages - 1
            ready = forward_end[stage, microbatch] if last else backward_end[stage + 1, microbatch]
            end = np.maximum(free[stage], ready) + BACKWARD * part[microbatch]
            backward_end[stage, microbatch] = end
        else:
            ready = forward_end[stage - 1, microbatch] if stage else free[stage]
            end = np.maximum(free[stage], ready) + part[microbatch]
            forward_end[stage, microbatch] = end
        free[stage] = end
    time: NDArray[np.float64] = free.max(axis=0)
    return time


@lru_cache(maxsize=16)
def schedule_1f1b(stages: int, num_microbatches: int) -> tuple[tuple[int, int, bool], ...]:
    """(stage, microbatch, is_backward) of all passes, each after those that it needs and those before on its stage."""
    order = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, num_microbatches)
        passes = [(microbatch, False) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            if microbatch + ahead < num_microbatches:
                passes.append((microbatch + ahead, False))
            passes.append((microbatch, True))
        order.append(passes)
    done: set[tuple[int, int, bool]] = set()
    place = [0] * stages
    found: list[tuple[int, int, bool]] = []
    while len(found) < 2 * stages * num_microbatches:
        for stage in range(stages):
            while place[stage] < len(order[stage]):
                microbatch, is_backward = order[stage][place[stage]]
                if is_backward:
                    needed = (stage + 1, microbatch, True) if stage < stages - 1 else (stage, microbatch, False)
                else:
                    needed = (stage - 1, microbatch, False)
                if needed not in done and (is_backward or stage):
                    break
                place[stage] += 1
                done.add((stage, microbatch, is_backward))
                found.append((stage, microbatch, is_backward))
    return tuple(found)
