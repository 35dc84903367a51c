"""Section "Placement" of docs/formats.md, written again from its text: costs, ranks and microbatches, plan digest.

In: costs of samples and a layout, data-parallel ranks and samples of a microbatch. Out: (dp_rank, microbatch) of each
sample. Nothing here imports torchmix or numpy.
"""

from __future__ import annotations

import hashlib
import struct


def costs_of_samples(cost: tuple[int, int, int], length: int, samples: int, rows: list[tuple[int, int]]) -> list[int]:
    """The cost of each sample; `cost` as of `BookJob`, `rows` are the sample and the tokens of each piece."""
    per_token, per_pair, per_whole_pair = cost
    costs = [per_token * length + per_whole_pair * length**2] * samples
    for sample, tokens in rows:
        costs[sample] += per_pair * tokens**2
    return costs


def placed_by_number(dp: int, size: int, samples: int) -> list[tuple[int, int]]:
    """`none`: (dp_rank, microbatch) of each sample."""
    return [(sample // size % dp, sample // (size * dp)) for sample in range(samples)]


def placed_by_rows(dp: int, size: int, costs: list[int]) -> list[tuple[int, int]]:
    """`rows`: (dp_rank, microbatch) of each sample."""
    samples = len(costs)
    dear_first = sorted(range(samples), key=lambda sample: (-costs[sample], sample))
    row_samples = dp * size
    count = samples // row_samples
    in_time = [*reversed(range(1, count, 2)), *range(0, count, 2)]
    load, here = [0] * dp, [0] * dp
    place: dict[int, tuple[int, int]] = {}
    for start in range(0, samples, dp):
        if start % row_samples == 0:
            here = [0] * dp
        order = [(here[rank], load[rank], rank) for rank in range(dp)]
        ranks = [rank for _, _, rank in sorted(order)]
        for rank, sample in zip(ranks, dear_first[start : start + dp], strict=True):
            load[rank] += costs[sample]
            here[rank] += costs[sample]
            place[sample] = (rank, in_time.index(start // row_samples))
    return [place[sample] for sample in range(samples)]


def cost_of_step(costs: list[int], places: list[tuple[int, int]]) -> int:
    """The sum over microbatches of the cost of the slowest rank."""
    loads: dict[tuple[int, int], int] = {}
    for cost, place in zip(costs, places, strict=True):
        loads[place] = loads.get(place, 0) + cost
    microbatches = {microbatch for _, microbatch in places}
    return sum(max(load for (_, m), load in loads.items() if m == microbatch) for microbatch in microbatches)


def plan_digest(dp: int, size: int, places: list[tuple[int, int]], digest: bytes) -> str:
    """The digest of a placement, after the order digest."""
    message = digest + struct.pack("<qq", dp, size)
    for sample, place in enumerate(places):
        slot = places[:sample].count(place)
        message += struct.pack("<qqq", *place, slot)
    return hashlib.sha256(message).digest()[:8].hex()
