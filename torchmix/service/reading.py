"""A loader's reading thread: requests one after the other, and pages ahead of need where none waits.

In: requests that were accepted, pages to decode or drop. Out: frames of replies, for the thread of the socket to send.
Must hold: what a request fails with is its client's to raise; a request that nobody waits for any more is not read.
Cost: that of the reader; a lock for each request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from torchmix.array_types import Int64Array
from torchmix.parallel.error_form import ErrorForm
from torchmix.service.messages import Arrays, FailureReply, PieceReply, encode, forms_of
from torchmix.service.served import ServedCatalogs

logger = logging.getLogger(__name__)
COUNT_S = 0.25
"""Between two sums of the readers' figures while requests wait."""
_LOOK_S = 1.0


class Work(msgspec.Struct, kw_only=True, eq=False):
    """What is done next: a request, or pages to decode ahead or to drop."""

    catalog: str
    sender: bytes = b""
    number: int = 0
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
        self._asked: deque[Work] = deque()
        self._ahead: deque[Work] = deque()
        self._came = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="torchmix-read", daemon=True)
        self.done: deque[tuple[bytes, tuple[bytes, memoryview] | None]] = deque()
        """Senders of requests that are done with, and their replies; None where nobody waits for one."""
        self.waiting_bytes = 0
        """Planned bytes of all requests that are not done with."""
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
        return len(self._asked)

    @property
    def is_asked(self) -> bool:
        """Whether a request is not done yet."""
        return bool(self._asked) or self._since_s > 0

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

    def add(self, *several: Work) -> None:
        """Have something done."""
        with self._came:
            for work in several:
                self.waiting_bytes += work.num_bytes
                (self._asked if work.pages is None else self._ahead).append(work)
            self._came.notify()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self.num_taken += 1
            if work.pages is not None:
                self._prepare(work, work.pages)
                continue
            if time.monotonic() > work.until_s:
                self.num_late += 1
                self.done.append((work.sender, None))
            else:
                self._since_s = time.monotonic()
                self.done.append((work.sender, self._read(work)))
                self._since_s = 0.0
                self._count(is_now=not self._asked)
            with self._came:
                self.waiting_bytes -= work.num_bytes
            self._wake()

    def _count(self, *, is_now: bool = True) -> None:
        """Sum the figures: at once where nothing waits, else four times a second."""
        now = time.monotonic()
        if is_now or now - self._counted_s > COUNT_S:
            self.figures, self._counted_s = self._served.stats(), now

    def _next(self) -> Work | None:
        with self._came:
            while not self._is_stopping and not self._asked and not self._ahead:
                self._came.wait(_LOOK_S)
            if self._is_stopping:
                return None
            return self._asked.popleft() if self._asked else self._ahead.popleft()

    def _read(self, work: Work) -> tuple[bytes, memoryview]:
        try:
            arrays = self._served.read(work.catalog, work.arrays)
            return encode(PieceReply(number=work.number, forms=forms_of(arrays)), arrays)
        except Exception as error:  # the edge of a process: carried to the client
            self.num_failures += 1
            logger.warning("a request of a client failed: %s", error)
            return encode(FailureReply(number=work.number, error=ErrorForm.of(error)))

    def _prepare(self, work: Work, pages: Int64Array) -> None:
        try:
            if work.num_clients:
                self._served.forget(work.catalog, work.source, pages, num_clients=work.num_clients)
            else:
                self._served.warm(work.catalog, work.source, pages)
            self._count()
        except Exception as error:  # the request that needs the page raises it
            logger.warning("met while reading ahead: %s", error)
