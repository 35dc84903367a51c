"""What a placement is judged by, and the least that any placement of the same items costs.

In: the cost of each bin. Out: one integer, and a bound below it. Must hold: no placement of the same items is below the
bound. Cost: a few array operations.

    rows       sum over microbatches of the slowest rank: a synchronous step, as with FSDP, or experts over ranks max
    the costliest bin rank       the slowest rank's sum: ranks meet once a step pipeline   `rows` and p - 1 times the
    costliest microbatch: 1F1B with p stages, which all microbatches fill and drain

Source for `pipeline`: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, with microbatches of different cost.
"""

from __future__ import annotations

from typing import Literal, get_args

from torchmix.array_types import Int64Array

Objective = Literal["rows", "max", "rank", "pipeline"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


def objective_of(cost_of_bin: Int64Array, objective: str, *, stages: int = 1) -> int:
    """Cost of a placement.

    Args:
        cost_of_bin: int64 [buckets, bins].
        objective: One of OBJECTIVES.
        stages: Stages of the pipeline, for `pipeline`.
    """
    if not cost_of_bin.size:
        return 0
    of_row = cost_of_bin.max(axis=0)
    if objective == "max":
        return int(of_row.max())
    if objective == "rank":
        return int(cost_of_bin.sum(axis=1).max())
    return int(of_row.sum()) + ((stages - 1) * int(of_row.max()) if objective == "pipeline" else 0)


def lower_bound_of(cost: Int64Array, num_buckets: int, num_bins: int, objective: str, *, stages: int = 1) -> int:
    """A bound that holds for every placement of these items; at least 1.

    Args:
        cost: int64 [n] of each item.
        num_buckets, num_bins: Of the placement.
        objective, stages: As in `objective_of`.
    """
    total, largest = int(cost.sum()), int(cost.max(initial=0))
    of_bin = max(-(-total // (num_buckets * num_bins)), largest)
    if objective == "max":
        return max(of_bin, 1)
    of_step = max(-(-total // num_buckets), largest)
    return max(of_step + ((stages - 1) * of_bin if objective == "pipeline" else 0), 1)
