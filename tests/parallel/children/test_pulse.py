"""What a process says of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tests.support.processes import wait_until
from torchmix.boards.board import shown_every_second
from torchmix.parallel import children as pulse
from torchmix.parallel.children import OwnPulse, ProcessBeat, ProcessWatch, waits_for_processor
from torchmix.parallel.liveness.evidence import Patience


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
    own.look(is_asked=True, num_signs=1)
    taken = threading.Thread(target=lambda: sum(range(5_000_000)))
    taken.start()
    taken.join()
    own.look(is_asked=True, num_signs=1)
    first, second, looked, worked = (beat.progress for beat in beats)
    assert second == first and looked == first + 1 and worked > looked


@contextmanager
def without_progress(**options: object) -> Iterator[None]:
    """What is done inside is no progress, however long it takes."""
    beats: list[ProcessBeat] = []
    own = OwnPulse(beats.append, **options)
    own.look(is_asked=True)
    yield
    own.look(is_asked=True)
    assert [beat.progress for beat in beats] == [beats[0].progress] * 2


def test_figures_that_are_shown_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.0)
    board: Any = SimpleNamespace(show=lambda name, figures, is_now: figures(), withdraw=lambda name: None)
    may_show, is_shown = threading.Event(), threading.Event()

    def figures() -> dict[str, int]:
        assert may_show.wait(60.0)
        began_ns = time.thread_time_ns()
        while time.thread_time_ns() < began_ns + 5 * pulse.GRAIN_NS:
            pass
        is_shown.set()
        return {"requests": 0}

    with shown_every_second(board, "serving", figures), without_progress():
        may_show.set()
        assert is_shown.wait(60.0)


def test_messages_that_are_carried_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.0)
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        there.connect(f"tcp://127.0.0.1:{here.bind_to_random_port('tcp://127.0.0.1')}")
        with without_progress(carriers="ZMQbg"):
            began_ns = time.process_time_ns() - time.thread_time_ns()
            while time.process_time_ns() - time.thread_time_ns() < began_ns + 5 * pulse.GRAIN_NS:
                for _ in range(100):
                    here.send(b"ping")
                for _ in range(100):
                    assert there.poll(60_000)
                    there.recv()


@pytest.mark.parametrize(
    ("steps", "runnable", "lost_after_s"),
    [
        (lambda now_s: now_s // 50, (), -1),  # a step each 50 s, of less than a grain of a processor's time
        (lambda now_s: 0, (7,), -1),  # other processes have the processors
        (lambda now_s: 0, (), 61),
        (lambda now_s: 0, (8,), 61),  # a thread that makes no steps
    ],
    ids=["steps", "runnable", "stuck", "another thread"],
)
def test_steps_and_a_thread_that_waits_for_a_processor_are_life(
    monkeypatch: pytest.MonkeyPatch, steps: Callable[[int], int], runnable: tuple[int, ...], lost_after_s: int
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now_s, process_time_ns=lambda: 5_000_000, thread_time_ns=lambda: 0)
    monkeypatch.setattr(pulse, "time", clock)
    beats: list[ProcessBeat] = []
    own = OwnPulse(beats.append, waits=lambda thread: thread in runnable)
    watch = ProcessWatch(patience=Patience(poll_s=0.5), now_s=0.0)
    lost_s = -1
    for now_s in range(1, 400):
        own.look(is_asked=True, num_signs=steps(now_s), threads=(7,))
        reasons = [watch.look(beats[-1], "running", now_s=now_s + part) for part in (0.0, 0.5)]
        if any(reasons):
            lost_s = now_s
            break
    assert lost_s == lost_after_s


def test_clocks_that_jump_back_hide_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[ProcessBeat] = []
    own = OwnPulse(beats.append)
    for now_s, used_ms in enumerate((900, 100, 110, 121)):
        clock = SimpleNamespace(
            monotonic=lambda now_s=now_s: 10.0 + now_s,
            process_time_ns=lambda used_ms=used_ms: used_ms * 1_000_000,
            thread_time_ns=lambda: 0,
        )
        monkeypatch.setattr(pulse, "time", clock)
        own.look(is_asked=True)
    assert [beat.progress for beat in beats] == [1, 1, 1, 2]


def test_the_kernel_says_which_threads_want_a_processor() -> None:
    rests = threading.Event()
    sleeper = threading.Thread(target=rests.wait)
    sleeper.start()
    wait_until(lambda: not waits_for_processor(sleeper.native_id or 0), deadline_s=60.0, what="the sleep of a thread")
    assert waits_for_processor(threading.get_native_id())
    rests.set()
    sleeper.join()
    assert not waits_for_processor(0)
