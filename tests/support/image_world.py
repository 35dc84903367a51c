"""A job with images inside one process: a thread for each rank, and a loop of sends in the place of `route`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.image_record import Record, exchanged
from tests.support.loaders import Rank, run_job
from torchmix.constructor.fields import Microbatch
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader


def steps_of_ranks(recipe: Path, topology: Topology, steps: int, **options: Any) -> list[list[list[Microbatch]]]:
    """By rank, the microbatches of each step."""

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        rank.result = [[]]
        for microbatch in loader:
            rank.result[-1].append(microbatch)
            if microbatch.is_last_of_step:
                rank.result.append([])
        rank.result.pop()

    ranks = run_job(recipe, topology, program=program, max_steps=steps, **options)
    return [rank.result for rank in ranks]


def records(recipe: Path, topology: Topology, steps: int, *, with_mrope: bool, **options: Any) -> list[dict[str, Any]]:
    """What each rank got, as `image_oracle.check` compares it."""
    found = [Record(topology=topology.with_rank(rank), with_mrope=with_mrope) for rank in range(topology.world_size)]
    for step in zip(*steps_of_ranks(recipe, topology, steps, **options), strict=True):
        encoded = [record.encode(of_rank) for record, of_rank in zip(found, step, strict=True)]
        rows, routes = [pair[0] for pair in encoded], [pair[1] for pair in encoded]
        for rank, record in enumerate(found):
            record.embed(step[rank], exchanged(rows, routes, rank), routes[rank])
    return [record.arrays() for record in found]
