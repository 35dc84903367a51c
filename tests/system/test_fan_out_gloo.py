"""Fan-out between real processes over gloo, while their main threads use the default group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import Processes

WORLD_SIZE = 4
NUM_STEPS = 5
DEADLINE_S = 240.0


@pytest.mark.system
@pytest.mark.parametrize(
    ("tp", "cp", "pp", "leaders"),
    [
        (2, 1, 1, "replica"),
        (1, 2, 1, "replica"),
        (1, 1, 4, "replica"),
        (2, 1, 2, "replica"),
        (1, 1, 1, "replica"),
        (4, 1, 1, "node"),
        (2, 1, 2, "stage"),
    ],
)
def test_every_rank_receives_its_share_from_its_leader(tmp_path: Path, tp: int, cp: int, pp: int, leaders: str) -> None:
    with Processes(tmp_path) as processes:
        ranks = [
            processes.fork_python(
                "-m",
                "tests.support.fan_out_rank",
                *(str(number) for number in (rank, WORLD_SIZE, tp, cp, pp)),
                str(tmp_path / "store"),
                str(NUM_STEPS),
                leaders,
                name=f"rank-{rank}",
            )
            for rank in range(WORLD_SIZE)
        ]
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
        assert [rank.stdout() for rank in ranks] == [f"received {NUM_STEPS}\n"] * WORLD_SIZE
