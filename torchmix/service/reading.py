"""A loader's reading thread: requests one after the other, and pages ahead of need where none waits.

In: requests that were accepted, pages to decode or drop. Out: frames of replies, for the thread of the socket to send.
Must hold: clients take turns, so that one waits for a request of each other client at most; what a request fails with
is its client's to raise; a request that nobody waits for any more is not read. Cost: that of the reader, and a lock for
each request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from torchmix.array_types import Int64Array
from torchmix.parallel.error_form import ErrorForm
from torchmix.service.messages import (
    MOST_PAGES,
    MOST_REASON,
    Arrays,
    FailureReply,
    PieceReply,
    encode,
    forms_of,
    one_line,
)
from torchmix.service.served import ServedCatalogs

logger = logging.getLogger(__name__)
COUNT_S = 0.25
"""Between two sums of the readers' figures while requests wait."""
_LOOK_S = 1.0


class Asker(msgspec.Struct, eq=False):
    """A client of a loader."""

    sender: bytes
    """Its connection."""
    catalog: str
    heard_s: float
    num_owed: int = 0
    """Requests that were accepted, and are not done with."""
    owed_bytes: int = 0
    """Planned bytes of requests whose replies have not left."""
    leaving: deque[tuple[Any, int]] = msgspec.field(default_factory=deque)
    """Replies that were sent and may not have left: how to know, and their planned bytes."""


class Work(msgspec.Struct, kw_only=True, eq=False):
    """What is done next: a request, or pages to decode ahead or to drop."""

    asker: Asker
    catalog: str
    number: int = 0
    checksum: int = 0
    """What the request's frames carry."""
    arrays: Arrays = msgspec.field(default_factory=dict)
    num_bytes: int = 0
    """Planned."""
    until_s: float = 0.0
    source: int = 0
    pages: Int64Array | None = None
    num_clients: int = 0
    """Pages that so many clients must need no more are dropped; 0: pages are decoded."""


class ReadingThread:
    """Reads for all clients of a loader."""

    def __init__(self, served: ServedCatalogs, wake: Callable[[], None]) -> None:
        """Nothing runs yet.

        Args:
            served: What is read.
            wake: Called after each request, so that its reply is taken.
        """
        self._served, self._wake = served, wake
        self._asked, self._ahead = _Turns(), _Turns()
        self._came = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="torchmix-read", daemon=True)
        self.done: deque[tuple[Work, tuple[bytes, memoryview] | None]] = deque()
        """Requests that are done with, and their replies; None where nobody waits for one."""
        self._since_s = self._counted_s = 0.0
        self.figures: dict[str, int | float] = {}
        """The readers' figures, summed."""
        self.num_failures = self.num_late = 0
        self.num_taken = 0
        """Requests and pages that it has begun with."""

    @property
    def thread_number(self) -> int:
        """The kernel's number of the thread; 0 before it runs."""
        return self._thread.native_id or 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._asked.num

    @property
    def is_asked(self) -> bool:
        """Whether a request is not done yet."""
        return self._asked.num > 0 or self._since_s > 0

    @property
    def at_hand_s(self) -> float:
        """Since when the request at hand is being read; 0 if there is none."""
        since_s = self._since_s
        return max(0.0, time.monotonic() - since_s) if since_s else 0.0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the request at hand."""
        with self._came:
            self._is_stopping = True
            self._came.notify_all()
        self._thread.join()

    def add(self, work: Work) -> None:
        """Have something done. Pages ahead are left out where MOST_PAGES of the client wait."""
        with self._came:
            if work.pages is None:
                self._asked.add(work)
            elif self._ahead.num_pages(work.asker) + len(work.pages) <= MOST_PAGES:
                self._ahead.add(work)
            self._came.notify()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self.num_taken += 1
            if work.pages is not None:
                self._prepare(work, work.pages)
                continue
            if time.monotonic() > work.until_s:
                self.num_late += 1
                self.done.append((work, None))
            else:
                self._since_s = time.monotonic()
                self.done.append((work, self._read(work)))
                self._since_s = 0.0
                self._count(is_now=not self._asked.num)
            self._wake()

    def _count(self, *, is_now: bool = True) -> None:
        """Sum the figures: at once where nothing waits, else four times a second."""
        now = time.monotonic()
        if is_now or now - self._counted_s > COUNT_S:
            self.figures, self._counted_s = self._served.stats(), now

    def _next(self) -> Work | None:
        with self._came:
            while not self._is_stopping and not self._asked.num and not self._ahead.num:
                self._came.wait(_LOOK_S)
            if self._is_stopping:
                return None
            return self._asked.take() if self._asked.num else self._ahead.take()

    def _read(self, work: Work) -> tuple[bytes, memoryview]:
        try:
            arrays = self._served.read(work.catalog, work.arrays)
            reply = PieceReply(number=work.number, request=work.checksum, forms=forms_of(arrays))
            return encode(reply, arrays)
        except Exception as error:  # the edge of a process: carried to the client
            self.num_failures += 1
            logger.warning("a request of a client failed: %s", one_line(str(error), MOST_REASON))
            return encode(FailureReply(number=work.number, error=ErrorForm.of(error)))

    def _prepare(self, work: Work, pages: Int64Array) -> None:
        try:
            if work.num_clients:
                self._served.forget(work.catalog, work.source, pages, num_clients=work.num_clients)
            else:
                at_once = self._served.pages_at_once(work.catalog, work.source)
                if len(pages) > at_once:  # requests come first
                    with self._came:
                        self._ahead.add(msgspec.structs.replace(work, pages=pages[at_once:]), is_first=True)
                self._served.warm(work.catalog, work.source, pages[:at_once])
            self._count()
        except Exception as error:  # the request that needs the page raises it
            logger.warning("met while reading ahead: %s", one_line(str(error), MOST_REASON))


class _Turns:
    """What clients wait for, one of each client in turn."""

    def __init__(self) -> None:
        self._of: dict[int, deque[Work]] = {}
        self.num = 0

    def add(self, work: Work, *, is_first: bool = False) -> None:
        """Behind all else of its client; or before it."""
        queue = self._of.setdefault(id(work.asker), deque())
        (queue.appendleft if is_first else queue.append)(work)
        self.num += 1

    def take(self) -> Work:
        """The next; its client comes last then."""
        asker = next(iter(self._of))
        queue = self._of.pop(asker)
        work = queue.popleft()
        if queue:
            self._of[asker] = queue
        self.num -= 1
        return work

    def num_pages(self, asker: Asker) -> int:
        """Pages that wait for a client."""
        return sum(1 + len(work.pages) for work in self._of.get(id(asker), ()) if work.pages is not None)
