"""What a process says of itself."""

from __future__ import annotations

import threading

from torchmix.parallel.children import pulse
from torchmix.parallel.children.judge import ProcessBeat
from torchmix.parallel.children.pulse import OwnPulse


def test_a_beat_is_sent_when_it_is_due(monkeypatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now_s)
    beats: list[ProcessBeat] = []
    own = OwnPulse(beats.append)
    for now_s in (100.0, 100.5, 101.0, 101.2, 104.0):
        own.look(is_asked=now_s > 101)
    assert [beat.count for beat in beats] == [1, 2, 3]
    assert [beat.is_asked for beat in beats] == [False, False, True]


def test_work_of_other_threads_and_looks_are_progress(monkeypatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.0)
    beats: list[ProcessBeat] = []
    own = OwnPulse(beats.append)
    own.look(is_asked=True)
    sum(range(3_000_000))  # of this thread, which beats
    own.look(is_asked=True)
    own.look(is_asked=True, num_looks=1)
    taken = threading.Thread(target=lambda: sum(range(5_000_000)))
    taken.start()
    taken.join()
    own.look(is_asked=True, num_looks=1)
    first, second, looked, worked = (beat.progress for beat in beats)
    assert second == first and looked == first + 1 and worked > looked
