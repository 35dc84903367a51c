"""A rank of this host that is gone or stopped is found by the kernel's word, whatever the store's pace is."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import Processes, wait_until
from torchmix.parallel.host_watch import STOPPED_LOOKS, HostWatch
from torchmix.parallel.ring import (
    MOST_REQUESTS_S,
    REQUESTS_A_POLL,
    Beat,
    Patience,
    RankIdentity,
    at_size,
    evidence_of_process,
    identity_of_process,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from liveness_scale import simulate

DEADLINE_S = 60.0


@pytest.mark.parametrize("world_size", [2, 300, 320, 1000, 4096, 20_000])
def test_the_store_is_asked_no_more_often_however_many_ranks_there_are(world_size: int) -> None:
    patience = at_size(Patience(), world_size)
    assert world_size * REQUESTS_A_POLL / patience.poll_s <= max(MOST_REQUESTS_S, 1)
    assert patience.poll_s == Patience().poll_s or (patience.poll_s > Patience().poll_s and world_size > 300)
    assert min(patience.remote_s, patience.store_s, patience.stall_s) >= 2 * patience.poll_s


def test_a_small_job_keeps_its_pace() -> None:
    assert at_size(Patience(), 300) == Patience()


def test_simulated_ranks_ask_as_often_as_is_said_and_name_a_death() -> None:
    found = simulate(640, 8, [321])
    assert found["requests_per_s"] <= MOST_REQUESTS_S
    assert found["named_s"] <= 2.0, "by the clock of the simulation: two looks at the host"
    assert found["all_know_s"] <= found["named_s"] + 2 * found["poll_s"]
    lost_host = simulate(640, 8, [*range(320, 328)])
    assert found["all_know_s"] < lost_host["all_know_s"] <= 5 * lost_host["poll_s"] + 11


class Job:
    """What ranks have written."""

    def __init__(self, identities: dict[int, RankIdentity]) -> None:
        self.identities, self.beats, self.ending = identities, dict[int, Beat](), set[int]()
        self.num_reads = 0

    def read(self, rank: int) -> tuple[Beat | None, RankIdentity | None]:
        self.num_reads += 1
        if rank not in self.identities:
            return None, None
        return self.beats.get(rank, Beat(count=3, step=17, is_done=False)), self.identities[rank]

    def watch(self, rank: int) -> HostWatch:
        return HostWatch(rank, self.identities, read=self.read, is_ending=lambda other: other in self.ending)


def test_ranks_that_are_gone_or_stopped_are_lost_and_those_that_are_done_are_not(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        children = [processes.start_python("-c", "import time; time.sleep(10_000)") for _ in range(3)]
        job = Job({rank: identity_of_process(child.pid) for rank, child in enumerate(children, 1)})
        job.identities[0] = identity_of_process(os.getpid())
        watch = job.watch(0)
        assert watch.look() is None and watch.look() is None
        assert job.num_reads == 1, "the store is asked for the next rank, once"
        children[0].send_signal(signal.SIGSTOP)
        wait_until(
            lambda: evidence_of_process(job.identities[1]) == "stopped", deadline_s=DEADLINE_S, what="a stopped rank"
        )
        found = [watch.look() for _ in range(STOPPED_LOOKS)]
        assert found[:-1] == [None] * (STOPPED_LOOKS - 1)
        assert found[-1] is not None and found[-1].rank == 1 and "is stopped" in found[-1].text
        for child in children[:2]:
            child.process.kill()
            child.process.wait()
        job.beats[1] = Beat(count=9, step=20, is_done=True)
        loss = watch.look()
        assert loss is not None and loss.rank == 2 and "was 17" in loss.text, "rank 1 was done, 2 is next"
        job.ending.add(2)
        watch = job.watch(3)
        assert watch.look() is None and job.watch(0).look_at_all() is None
