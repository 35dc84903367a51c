"""When a worker counts as lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchmix.parallel.children import ProcessWatch
from torchmix.parallel.liveness.evidence import Evidence, Patience
from torchmix.steps.worker.messages import ProcessBeat

PATIENCE = Patience(poll_s=0.25)


def seconds_until_lost(
    beat_at: Callable[[float], ProcessBeat | None], evidence: Evidence, *, most_s: float = 700.0
) -> tuple[float, str]:
    """How long a worker is borne, and what is said of it; -1 if it is borne for ever."""
    watch, now_s = ProcessWatch(patience=PATIENCE, now_s=0.0), 0.0
    while now_s < most_s:
        now_s += 0.25
        reason = watch.look(beat_at(now_s), evidence, now_s=now_s)
        if reason is not None:
            return now_s, reason
    return -1.0, ""


def beats(*, is_asked: bool, progress: Callable[[float], int] = lambda _: 0) -> Callable[[float], ProcessBeat]:
    return lambda now_s: ProcessBeat(count=int(now_s), is_asked=is_asked, progress=progress(now_s))


def silent(_: float) -> ProcessBeat:
    return ProcessBeat(count=1, is_asked=False, progress=0)


def test_one_that_has_ended_is_lost_at_once() -> None:
    assert seconds_until_lost(beats(is_asked=True), "gone") == (0.25, "has ended")


def test_one_that_is_stopped_is_lost_after_three_seconds() -> None:
    after_s, reason = seconds_until_lost(silent, "stopped")
    assert 3 <= after_s <= 3.5
    assert reason.startswith("is stopped, for 3")


def test_one_that_imports_for_long_may_be_stopped_for_a_moment() -> None:
    watch = ProcessWatch(patience=PATIENCE, now_s=0.0)
    looks = [(number / 4, "stopped" if number % 12 else "running") for number in range(1, 400)]
    assert not any(watch.look(None, evidence, now_s=now_s) for now_s, evidence in looks)  # type: ignore[arg-type]


@pytest.mark.parametrize("evidence", ["running", "unknown"])
def test_one_that_does_not_beat_is_lost_after_a_minute(evidence: Evidence) -> None:
    after_s, reason = seconds_until_lost(silent, evidence)
    assert 60 <= after_s <= 61
    assert "Python in it does not" in reason


def test_one_that_still_imports_is_borne_for_longer() -> None:
    after_s, _ = seconds_until_lost(lambda _: None, "running")
    assert after_s == PATIENCE.join_s


def test_one_that_does_nothing_for_a_step_is_lost_after_a_minute() -> None:
    after_s, reason = seconds_until_lost(beats(is_asked=True), "running")
    assert 60 <= after_s <= 62
    assert "for what is waited for" in reason


def test_one_that_works_on_a_step_is_never_lost_by_time_alone() -> None:
    # A little each 50 s, as a slow disk lets it.
    assert seconds_until_lost(beats(is_asked=True, progress=lambda now_s: int(now_s / 50)), "running")[0] == -1


def test_one_that_nobody_asks_may_rest() -> None:
    assert seconds_until_lost(beats(is_asked=False), "running")[0] == -1


def test_time_in_which_the_watcher_did_not_run_is_not_held_against_the_worker() -> None:
    watch = ProcessWatch(patience=PATIENCE, now_s=0.0)
    watch.look(silent(0.0), "stopped", now_s=0.25)
    assert watch.look(silent(0.0), "stopped", now_s=500.0) is None
