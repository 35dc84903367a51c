"""Real ranks over gloo that go from layout to layout, compared with jobs that resume at each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.loaders import run_job, write_job
from tests.support.processes import Processes
from tests.support.reshard_rank import digest_of
from torchmix.parallel.topology import Topology

WORLD_SIZE, STEPS = 4, 2
DEADLINE_S = 120.0


def expected_lines(recipe: Path, sizes: list[int]) -> list[list[str]]:
    """What each rank should print: of jobs in one process, each of which goes on from the state of the one before."""
    lines: list[list[str]] = [[] for _ in range(WORLD_SIZE)]
    state: dict[str, Any] | None = None
    for place, tp in enumerate(sizes):
        ranks = run_job(recipe, Topology(tp=tp, dp=WORLD_SIZE // tp), steps=STEPS, state=state)
        state = ranks[0].state
        for found, rank in zip(lines, ranks, strict=True):
            for step, digest in enumerate(rank.digests, start=place * STEPS):
                tensors = digest_of([microbatch for microbatch in rank.microbatches if microbatch.step == step])
                found.append(f"tp {tp} step {step} digest {digest} tensors {tensors}")
    return lines


@pytest.mark.system
@pytest.mark.parametrize("where", ["in_process", "node"])
def test_a_job_goes_from_layout_to_layout(where: str, tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    sizes = [1, 2, 4, 1]
    words = (str(recipe), where, str(STEPS), *map(str, sizes))
    with Processes(tmp_path) as processes:
        ranks = processes.start_ranks("-m", "tests.support.reshard_rank", *words, world_size=WORLD_SIZE)
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
        found = [rank.stdout().splitlines() for rank in ranks]
    assert found == expected_lines(recipe, sizes)


@pytest.mark.system
def test_ranks_that_mean_different_steps_all_refuse(tmp_path: Path) -> None:
    words = (str(write_job(tmp_path)), "in_process", "1", "1", "refuse")
    with Processes(tmp_path) as processes:
        ranks = processes.start_ranks("-m", "tests.support.reshard_rank", *words, world_size=WORLD_SIZE)
        for rank in ranks:
            rank.wait(deadline_s=DEADLINE_S)
        last = [rank.stdout().splitlines()[-1] for rank in ranks]
        assert last == ["refused RankLost", "refused StateError", "refused RankLost", "refused RankLost"], (
            processes.report()
        )
