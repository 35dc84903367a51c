"""A process keeps its loader and node worker over the end of all process groups in it, as in-process restarts do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loaders import run_job, write_job
from tests.support.processes import Processes
from torchmix.parallel.topology import Topology

WORLD_SIZE, STEPS = 2, 2
DEADLINE_S = 120.0


@pytest.mark.system
@pytest.mark.parametrize("how", ["abort", "error"])
def test_loaders_outlive_the_groups_of_their_process(how: str, tmp_path: Path) -> None:
    """`abort`: all groups are destroyed while ranks read ahead; `error`: a rank fails, and the other names it."""
    recipe = write_job(tmp_path)
    expected = run_job(recipe, Topology(), steps=3 * STEPS)[0].digests
    with Processes(tmp_path) as processes:
        ranks = processes.start_ranks(
            "-m", "tests.support.restart_rank", str(recipe), str(STEPS), how, world_size=WORLD_SIZE
        )
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
        found = [rank.stdout().splitlines() for rank in ranks]
    assert found[0][0].startswith("worker ") and {line for line in found[0] if "worker" in line} == {found[0][0]}
    for lines in found:
        assert [line for line in lines if line.startswith("step")] == [
            f"step {step} digest {digest}" for step, digest in enumerate(expected)
        ]
    if how == "error":
        assert sum(line == "lost rank 1" for line in found[0]) == 2
