"""Items of a thread, in order, with its errors, and nothing left running."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.deadlines import LONG_S
from torchmix.steps.ahead import Ahead


def test_items_come_in_order_and_end() -> None:
    assert list(Ahead(iter(range(100)), depth=3, name="t")) == list(range(100))


def test_no_more_than_depth_items_are_made_ahead() -> None:
    started: list[int] = []
    reached = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for item in range(10):
            started.append(item)
            reached.release()
            yield item

    ahead = Ahead(items(), depth=3, name="t")
    for _ in range(3):
        assert reached.acquire(timeout=LONG_S)
    assert not reached.acquire(timeout=0.05)
    assert started == [0, 1, 2]
    assert next(ahead) == 0
    assert reached.acquire(timeout=LONG_S)
    assert ahead.close(timeout_s=LONG_S)


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("the third")

    ahead = Ahead(items(), depth=5, name="t")
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="the third"):
            next(ahead)


def test_close_runs_the_generators_finally_in_its_thread() -> None:
    finished_in: list[str] = []

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            finished_in.append(threading.current_thread().name)

    ahead = Ahead(items(), depth=1, name="the-thread")
    assert next(ahead) == 0
    assert ahead.close(timeout_s=LONG_S)
    assert finished_in == ["the-thread"]
    with pytest.raises(StopIteration):
        next(ahead)


def test_waiting_can_time_out_and_go_on() -> None:
    gate = threading.Event()

    def items() -> Iterator[int]:
        assert gate.wait(LONG_S)
        yield 7

    ahead = Ahead(items(), depth=1, name="t")
    with pytest.raises(TimeoutError):
        ahead.take(timeout_s=0.01)
    gate.set()
    assert ahead.take(timeout_s=LONG_S) == 7
