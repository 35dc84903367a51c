"""A rank of this host that is gone or stopped is found by the kernel's word, whatever the store's pace is."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import msgspec

from tests.support.processes import Processes, wait_until
from torchmix.parallel.liveness.evidence import (
    Beat,
    Loss,
    RankIdentity,
    evidence_of_process,
    has_pulse,
    identity_of_process,
)
from torchmix.parallel.liveness.guard import STOPPED_LOOKS, HostWatch

DEADLINE_S = 60.0


class Job:
    """What ranks have written."""

    def __init__(self, identities: dict[int, RankIdentity]) -> None:
        self.identities, self.beats, self.ending = identities, dict[int, Beat](), set[int]()
        self.num_reads = 0
        self.loss: Loss | None = None

    def read(self, rank: int) -> tuple[Beat | None, RankIdentity | None]:
        self.num_reads += 1
        if rank not in self.identities:
            return None, None
        return self.beats.get(rank, Beat(count=3, step=17, is_done=False)), self.identities[rank]

    def watch(self, rank: int) -> HostWatch:
        return HostWatch(
            rank,
            self.identities,
            read=self.read,
            is_ending=lambda other: other in self.ending,
            standing_loss=lambda: self.loss,
        )


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


def test_a_loss_is_heard_of_when_the_pulse_of_the_lookout_has_ended() -> None:
    may_end = threading.Event()
    pulses = [threading.Thread(target=may_end.wait) for _ in range(2)]
    for pulse in pulses:
        pulse.start()
    here = identity_of_process(os.getpid())
    numbers = [0, *(pulse.native_id or 0 for pulse in pulses)]
    job = Job({rank: msgspec.structs.replace(here, pulse=number) for rank, number in enumerate(numbers)})
    job.loss = Loss(rank=9, text="rank 9 is lost")
    watch = job.watch(0)
    assert watch.hear() is None, "who beats has read of no loss, and the store is not asked"
    may_end.set()
    for pulse in pulses:
        pulse.join()
    wait_until(
        lambda: not any(map(has_pulse, job.identities.values())), deadline_s=DEADLINE_S, what="end of the threads"
    )
    assert watch.hear() is job.loss
    job.loss = None
    assert watch.hear() is None, "a pulse that has ended is no loss"
    job.beats = {rank: Beat(count=5, step=3, is_done=True) for rank in (1, 2)}
    assert watch.hear() is None
    num_reads = job.num_reads
    assert watch.hear() is None and job.num_reads == num_reads, "ranks that are done are asked for once"
    assert job.watch(2).hear() is None, "the lookout itself reads the store"
