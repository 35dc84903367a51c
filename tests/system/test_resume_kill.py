"""Real ranks over gloo: killed at random moments and resumed at other sizes, they follow one order.

The moments come from a seed that is printed; `TORCHMIX_TEST_SEED` repeats one.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.loaders import run_job, write_job
from tests.support.processes import Child, Processes
from torchmix.parallel.topology import Topology

pytestmark = pytest.mark.system
DEADLINE_S = 180.0
STEPS = 40
MOST_FURTHER = 3
"""How many steps a job may do between the step at which it is to be killed and the kill."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def digests(job: Path) -> dict[int, str]:
    return dict(enumerate(run_job(job, Topology(), steps=STEPS, keep=False)[0].digests))


def start_job(
    processes: Processes,
    job: Path,
    saves: Path,
    world_size: int,
    *,
    tp: int,
    cp: int,
    pp: int,
    loaders: str,
    ahead: int,
    hold_at: int | None = None,
) -> list[Child]:
    sizes = (loaders, tp, cp, pp, ahead, STEPS)
    program = ("-m", "tests.support.loader_rank", str(job), str(saves), *map(str, sizes))
    return processes.start_ranks(*program, world_size=world_size, environment={"HOLD_AT": str(hold_at)})


def digests_in(child: Child) -> dict[int, str]:
    return {int(step): digest for step, digest in re.findall(r"^step (\d+) digest (\w+)$", child.stdout(), re.M)}


@pytest.mark.parametrize(
    ("dp", "tp", "cp", "pp", "loaders", "ahead"),
    [(2, 1, 1, 1, "node", 4), (1, 2, 1, 2, "node", 1), (2, 1, 2, 1, "in_process", 4)],
)
def test_real_ranks_and_workers_follow_the_same_order(
    job: Path, digests: dict[int, str], tmp_path: Path, dp: int, tp: int, cp: int, pp: int, loaders: str, ahead: int
) -> None:
    world_size = dp * tp * cp * pp
    with Processes(tmp_path) as processes:
        ranks = start_job(processes, job, tmp_path, world_size, tp=tp, cp=cp, pp=pp, loaders=loaders, ahead=ahead)
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
        for rank, child in enumerate(ranks):
            assert digests_in(child) == digests, f"rank {rank}"
        opened = [set(re.findall(r"^opened (.+)$", child.stdout(), re.M)) for child in ranks]
    places = Topology.from_world(world_size=world_size, rank=0, tp=tp, cp=cp, pp=pp)
    for rank, paths in enumerate(opened):
        if places.with_rank(rank).is_leader:
            # A leader reads in its own process only if it has no worker.
            assert any(path.endswith(".parquet") for path in paths) == (loaders == "in_process"), paths
        else:
            assert not paths, f"peer {rank} opened {paths}"


def test_killed_at_random_and_resumed_at_other_sizes_the_order_continues(
    job: Path, digests: dict[int, str], tmp_path: Path
) -> None:
    seed = int(os.environ.get("TORCHMIX_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"TORCHMIX_TEST_SEED={seed}")
    moments = random.Random(seed)
    found: dict[int, str] = {}
    # (world size, tp, cp, pp, loaders, ahead), and whether it is killed
    jobs = [(4, 2, 1, 1, "node", 2), (2, 1, 1, 1, "in_process", 4), (3, 1, 1, 3, "in_process", 1)]
    stop = 0
    with Processes(tmp_path) as processes:
        for number, (world_size, tp, cp, pp, loaders, ahead) in enumerate(jobs):
            is_killed = number < len(jobs) - 1
            stop = stop + MOST_FURTHER + moments.randrange(2, 13) if is_killed else STEPS
            sizes = {"tp": tp, "cp": cp, "pp": pp, "loaders": loaders, "ahead": ahead}
            ranks = start_job(processes, job, tmp_path, world_size, **sizes, hold_at=stop + MOST_FURTHER)
            if is_killed:
                ranks[0].wait_for_line(f"step {stop} ", deadline_s=DEADLINE_S)
                time.sleep(moments.random() / 50)  # the moment of the kill; nothing waits for it
                victim = moments.randrange(world_size)
                ranks[victim].send_signal(signal.SIGKILL)
                assert all(child.wait(deadline_s=DEADLINE_S) for child in ranks), processes.report()
                for rank, child in enumerate(ranks):
                    assert rank == victim or f"rank {victim}" in child.stderr(), child.report()
            else:
                processes.wait_all(ranks, deadline_s=DEADLINE_S)
            for child in ranks:
                for step, digest in digests_in(child).items():
                    assert found.setdefault(step, digest) == digest
    assert found == digests
