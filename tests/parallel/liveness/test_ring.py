"""The judgement whether the next rank is alive, over invented beats, clocks and kernels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import cycle

import msgspec
import pytest

from tests.support.processes import wait_until
from torchmix.parallel.liveness.evidence import (
    Beat,
    Evidence,
    Loss,
    Patience,
    RankIdentity,
    evidence_of_process,
    has_pulse,
    identity_of_this_process,
    pace_at_size,
    patience_of,
)
from torchmix.parallel.liveness.ring import RingWatch, Silence

PATIENCE = Patience()
POLL_S = PATIENCE.poll_s
SOMEBODY = RankIdentity(host="node7", pid=99, started="5", pid_space="elsewhere")


def watch(evidence: Callable[[], Evidence], *, rank: int = 0, world_size: int = 3) -> RingWatch:
    return RingWatch(
        rank=rank, world_size=world_size, patience=PATIENCE, now_s=0.0, evidence_of=lambda identity: evidence()
    )


def beats(count: int, *, step: int = 17, is_done: bool = False) -> Beat:
    return Beat(count=count, step=step, is_done=is_done)


def looks(num: int, *, start_s: float = 0.0) -> Iterator[float]:
    return (start_s + (index + 1) * POLL_S for index in range(num))


def first_loss(eye: RingWatch, beat: Beat | None, *, limit_s: float, start_s: float = 0.0) -> tuple[float, str] | None:
    """Seconds until the rank is lost when its beat never changes again, and how; None if not within the limit."""
    identity = SOMEBODY if beat is not None else None
    for now_s in looks(int(limit_s / POLL_S), start_s=start_s):
        loss = eye.look(beat, identity, now_s=now_s)
        if loss is not None:
            assert loss.rank == eye.target
            return now_s - start_s, loss.text
    return None


def test_a_rank_that_beats_is_alive_for_ever() -> None:
    eye = watch(lambda: "unknown")
    assert all(eye.look(beats(count), SOMEBODY, now_s=now_s) is None for count, now_s in enumerate(looks(1000)))


def test_a_rank_of_another_host_is_lost_after_silence() -> None:
    found = first_loss(watch(lambda: "unknown"), beats(1), limit_s=20)
    assert found is not None
    assert found == (
        PATIENCE.remote_s + POLL_S,
        "rank 1 (host node7, pid 99) silent for 11.0 s; the last step it delivered was 17",
    )


@pytest.mark.parametrize("ranks_of_host", [1, 8])
@pytest.mark.parametrize("world_size", [8, 307, 512, 4096, 20_000])
def test_a_call_that_keeps_the_interpreters_lock_for_6_s_on_another_host_is_no_loss(
    world_size: int, ranks_of_host: int
) -> None:
    """Again and again, with one beat between two of them, at any size of the job."""
    every_s = pace_at_size(POLL_S, world_size=world_size, ranks_of_host=ranks_of_host).fast_s
    eye = watch(lambda: "unknown")

    def look(count: int) -> Loss | None:
        nonlocal now_s
        now_s += every_s
        beat = Beat(count=count, step=17, is_done=False, every_s=every_s)
        return eye.look(beat, SOMEBODY, now_s=now_s, every_s=every_s)

    now_s = 0.0
    for count in range(20):
        until_s = now_s + 6.0 + every_s  # the beat is written at most a pause after the call
        while now_s < until_s:
            assert look(count) is None
    begun_s, found = now_s, None
    while found is None:
        found = look(20)
    assert found.rank == 1, "a host that stays silent is lost"
    assert now_s - begun_s <= max(PATIENCE.remote_s, 3 * every_s) + 2 * every_s


def test_whoever_beats_slowly_may_be_silent_for_three_beats() -> None:
    eye = watch(lambda: "unknown")
    beat = Beat(count=1, step=17, is_done=False, every_s=20.0)
    lost = [now_s for now_s in looks(200) if eye.look(beat, SOMEBODY, now_s=now_s) is not None]
    assert lost[0] == 60.0 + POLL_S


def test_whoever_looks_slowly_counts_no_silence_that_it_has_not_seen() -> None:
    eye = watch(lambda: "unknown")
    assert eye.look(beats(1), SOMEBODY, now_s=20.0, every_s=20.0) is None
    assert [eye.look(beats(1), SOMEBODY, now_s=now_s, every_s=20.0) is None for now_s in (40.0, 60.0, 80.0)] == [
        True,
        True,
        False,
    ]


def test_a_stopped_process_is_lost_after_silence() -> None:
    found = first_loss(watch(lambda: "stopped"), beats(1, step=-1), limit_s=20)
    assert found is not None
    assert found[0] == PATIENCE.silence_s + 2 * POLL_S  # its beat is seen once, then it is seen to be stopped
    assert "silent for 3.5 s: the process is stopped; by its last beat it had delivered no step" in found[1]


def test_a_rank_that_beats_slowly_may_be_stopped_for_a_moment() -> None:
    evidence = cycle(["running", *["stopped"] * 5])
    eye = watch(lambda: next(evidence))
    beat = Beat(count=1, step=17, is_done=False, every_s=20.0)
    assert all(eye.look(beat, SOMEBODY, now_s=now_s) is None for now_s in looks(50))


def test_a_process_that_runs_may_be_silent_for_longer() -> None:
    assert first_loss(watch(lambda: "running"), beats(1), limit_s=PATIENCE.stall_s - 1) is None
    found = first_loss(watch(lambda: "running"), beats(1), limit_s=2 * PATIENCE.stall_s)
    assert found is not None
    assert "it runs, but Python in it does not" in found[1]


def test_a_process_that_is_gone_is_lost_at_the_second_look() -> None:
    found = first_loss(watch(lambda: "gone"), beats(1), limit_s=20)
    assert found is not None
    assert found[0] == 3 * POLL_S  # its beat is seen once, then it is seen to be gone twice
    assert "(host node7, pid 99) was killed or ended without closing its loader; the last step" in found[1]


def test_a_farewell_written_before_the_end_is_honoured() -> None:
    eye = watch(lambda: "gone")
    assert eye.look(beats(1), SOMEBODY, now_s=POLL_S) is None
    assert eye.look(beats(1), SOMEBODY, now_s=2 * POLL_S) is None
    assert eye.look(beats(2, is_done=True), SOMEBODY, now_s=3 * POLL_S) is None
    assert eye.target == 2


def test_a_resumed_beat_ends_the_suspicion() -> None:
    answers: list[Evidence] = ["gone", "gone"]
    eye = watch(lambda: answers.pop(0))
    for now_s, count in zip(looks(4), (1, 1, 2, 2), strict=True):
        assert eye.look(beats(count), SOMEBODY, now_s=now_s) is None


def test_time_in_which_the_watcher_itself_was_stopped_is_not_held_against_others() -> None:
    eye = watch(lambda: "unknown")
    assert eye.look(beats(1), SOMEBODY, now_s=POLL_S) is None
    assert eye.look(beats(1), SOMEBODY, now_s=1000.0) is None
    assert eye.look(beats(2), SOMEBODY, now_s=1000.0 + POLL_S) is None


def test_a_rank_that_never_joins_is_lost_in_the_end() -> None:
    assert first_loss(watch(lambda: "unknown"), None, limit_s=PATIENCE.join_s - 1) is None
    found = first_loss(watch(lambda: "unknown"), None, limit_s=2 * PATIENCE.join_s)
    assert found is not None
    assert found[1] == "rank 1 has not opened its loader for 600 s; every rank of the job must"


def test_the_ring_closes_over_ranks_that_are_done() -> None:
    eye = watch(lambda: "unknown", rank=2, world_size=4)
    targets = []
    for now_s in looks(5):
        targets.append(eye.target)
        assert eye.look(beats(1, is_done=True), SOMEBODY, now_s=now_s) is None
    assert targets == [3, 0, 1, None, None]


def test_each_rank_is_watched_by_the_one_before_it() -> None:
    assert [watch(lambda: "unknown", rank=rank).target for rank in range(3)] == [1, 2, 0]


def test_silence_grows_by_two_polls_a_look_at_most() -> None:
    silence = Silence(poll_s=0.5, now_s=0.0)
    assert [silence.look(count, now_s=now_s) for count, now_s in ((1, 0.5), (1, 1.0), (1, 9.0), (2, 9.5))] == [
        0.0,
        0.5,
        1.5,
        0.0,
    ]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process that prints who it is and waits."""
    code = (
        "import msgspec, time\nfrom torchmix.parallel.liveness.evidence import identity_of_this_process\n"
        "print(msgspec.json.encode(identity_of_this_process()).decode(), flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_kernel_tells_running_stopped_and_gone(sleeper: subprocess.Popen[str]) -> None:
    assert sleeper.stdout is not None
    identity = msgspec.json.decode(sleeper.stdout.readline(), type=RankIdentity)
    assert identity.pid == sleeper.pid
    assert evidence_of_process(identity) == "running"
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: evidence_of_process(identity) == "stopped", deadline_s=10, what="a stopped process")
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: evidence_of_process(identity) == "running", deadline_s=10, what="a resumed process")
    sleeper.kill()
    wait_until(lambda: evidence_of_process(identity) == "gone", deadline_s=10, what="a zombie is gone")
    sleeper.wait()
    assert evidence_of_process(identity) == "gone"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_kernel_tells_whether_a_thread_that_beats_has_ended() -> None:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    identity = msgspec.structs.replace(identity_of_this_process(), pulse=thread.native_id)
    assert has_pulse(identity)
    may_end.set()
    thread.join()
    wait_until(lambda: not has_pulse(identity), deadline_s=60, what="end of the thread")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    mine = identity_of_this_process()
    assert (mine.pid, evidence_of_process(mine)) == (os.getpid(), "running")
    assert evidence_of_process(msgspec.structs.replace(mine, started="1")) == "gone"


@pytest.mark.parametrize("field", ["pid_space", "started"])
def test_nothing_is_known_of_a_process_that_cannot_be_compared(field: str) -> None:
    assert evidence_of_process(msgspec.structs.replace(identity_of_this_process(), **{field: ""})) == "unknown"


def test_a_longer_patience_is_borne_of_the_store_and_of_ranks_here_and_elsewhere() -> None:
    assert patience_of(None) == Patience()
    assert patience_of(30.0) == Patience(remote_s=30.0, store_s=30.0)
    longest = patience_of(200.0)
    assert (longest.remote_s, longest.store_s, longest.stall_s) == (200.0, 200.0, 200.0)
    assert longest.silence_s == Patience().silence_s, "a process that is seen to be stopped is lost as soon as ever"
