"""The trial of frames at a small count."""

from __future__ import annotations

from tests.trials.loader_frames import run


def test_frames_are_taken_or_refused_and_a_loader_goes_on() -> None:
    counts = run(4, 3000)
    assert counts["taken"] > 0 and counts["refused"] > 1000 and counts["huge"] > 0
