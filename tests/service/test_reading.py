"""A loader's reading thread: clients take turns, and pages ahead of need have a bound."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from tests.support.deadlines import LONG_S
from tests.support.processes import wait_until
from torchmix.service.messages import MOST_PAGES
from torchmix.service.served import Asker, ReadingThread, Work


class Slow:
    """Reads on demand."""

    def __init__(self) -> None:
        self.may_read, self.is_reading = threading.Event(), threading.Event()
        self.warmed: list[int] = []

    def read(self, catalog: str, arrays: Any) -> Any:
        self.is_reading.set()
        assert self.may_read.wait(LONG_S)
        return {}

    def pages_at_once(self, catalog: str, source: int) -> int:
        return 3

    def warm(self, catalog: str, source: int, pages: Any) -> None:
        self.warmed.append(len(pages))

    def stats(self) -> dict[str, int]:
        return {}


def test_clients_take_turns_and_pages_come_behind_requests() -> None:
    slow, done = Slow(), threading.Semaphore(0)
    reading = ReadingThread(slow, done.release)  # type: ignore[arg-type]
    one, other = (Asker(name, "", 0.0) for name in (b"one", b"other"))
    reading.start()
    try:
        reading.add(Work(asker=one, catalog="", number=0, until_s=1e18))
        assert slow.is_reading.wait(LONG_S)
        for number in (1, 2, 3):
            reading.add(Work(asker=one, catalog="", number=number, until_s=1e18))
        reading.add(Work(asker=other, catalog="", number=4, until_s=1e18))
        for count in (7, MOST_PAGES, 2):  # the second is more than may wait beside the first
            reading.add(Work(asker=one, catalog="", source=0, pages=np.arange(count)))
        assert reading.num_waiting == 4 and not slow.warmed
        slow.may_read.set()
        for _ in range(5):
            assert done.acquire(timeout=LONG_S)
        assert [work.number for work, _ in reading.done] == [0, 1, 4, 2, 3]
        wait_until(lambda: sum(slow.warmed) == 9, deadline_s=LONG_S, what="pages ahead")
    finally:
        reading.stop()
    assert slow.warmed == [3, 3, 1, 2]
