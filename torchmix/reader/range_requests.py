"""Byte ranges of objects -> few requests, several under way at once.

In: all ranges that a call will read, in the order in which it will use them. Out: their bytes, when they are asked for.
Must hold: bytes and errors are those of reading the ranges one after the other, since each is waited for where it is
used; only bytes of named ranges are kept. Cost: one request for a group of neighbours, and a copy of their bytes; at
most MOST_REQUESTS threads, and HELD_BYTES of bytes not used yet, or more where ranges are used out of order.

Ranges with a gap of GAP_BYTES or less are neighbours: such a gap takes 1 ms at 60 MB/s, a request takes 10 to 100 ms. A
gap is as large as a small page, so less than twice the needed bytes are fetched where pages have 64 KiB or more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from torchmix.reader.open_objects import OpenObjects

GAP_BYTES = 64 << 10
MOST_REQUEST_BYTES = 8 << 20
"""Most bytes of a request; larger ranges are split, because several connections are faster than one."""
MOST_REQUESTS = 16
"""Most requests of one reader under way at once. With 20 ms a request and pages of 64 KiB they bring 50 MB/s; stores
allow hundreds."""
HELD_BYTES = 64 << 20
"""Most bytes of one reader that are requested and not used yet: 16 requests of 4 MiB."""


class Wanted(NamedTuple):
    """A range that will be read."""

    objects: OpenObjects
    file: int
    offset: int
    num_bytes: int


class Request(NamedTuple):
    """A range that one request asks for."""

    objects: OpenObjects
    file: int
    start: int
    stop: int
    num_uses: int
    """Number of named ranges that need some of its bytes."""


def plan_requests(wanted: Sequence[Wanted]) -> list[Request]:
    """Requests that cover all ranges, in the order of their first use."""
    of_file: dict[tuple[int, int], list[int]] = {}
    for place, one in enumerate(wanted):
        if one.num_bytes:
            of_file.setdefault((id(one.objects), one.file), []).append(place)
    planned: list[tuple[int, Request]] = []
    for places in of_file.values():
        places.sort(key=lambda place: wanted[place].offset)
        together: list[int] = []
        stop = 0
        for place in places:
            offset, num_bytes = wanted[place].offset, wanted[place].num_bytes
            if together and offset > stop + GAP_BYTES:
                planned += _cut(wanted, together, stop)
                together, stop = [], 0
            together.append(place)
            stop = max(stop, offset + num_bytes)
        planned += _cut(wanted, together, stop)
    planned.sort(key=lambda one: (one[0], one[1].start))
    return [request for _, request in planned]


def _cut(wanted: Sequence[Wanted], places: Sequence[int], stop: int) -> Iterable[tuple[int, Request]]:
    """Neighbouring ranges, by offset, as requests of at most MOST_REQUEST_BYTES, each with the place of its first use.

    A gap between ranges is fetched only inside a request.
    """
    objects, file, begin, _ = wanted[places[0]]
    for start in range(begin, stop, MOST_REQUEST_BYTES):
        end = min(start + MOST_REQUEST_BYTES, stop)
        uses = [p for p in places if wanted[p].offset < end and sum(wanted[p][2:]) > start]
        if uses:
            first = max(start, min(wanted[p].offset for p in uses))
            last = min(end, max(sum(wanted[p][2:]) for p in uses))
            yield min(uses), Request(objects, file, first, last, len(uses))


class RequestPool:
    """Threads that fetch, and the number of bytes that all fetches of a reader hold."""

    def __init__(self) -> None:
        """No thread runs yet."""
        self._threads: ThreadPoolExecutor | None = None
        self.held_bytes = 0
        self.num_requests = 0

    def submit(self, request: Request) -> Future[bytes]:
        """Begin a request."""
        self._threads = self._threads or ThreadPoolExecutor(MOST_REQUESTS, "torchmix-fetch")
        self.num_requests += 1
        size = request.stop - request.start
        return self._threads.submit(request.objects.read, request.file, request.start, size)

    def close(self) -> None:
        """End the threads, after the requests that are under way."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None


class _Part:
    """A request and its result."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.uses_left = request.num_uses
        self.coming: Future[bytes] | None = None


class RangeFetch:
    """The requests of one call; belongs to one thread, and is closed after use."""

    def __init__(self, pool: RequestPool, wanted: Sequence[Wanted]) -> None:
        """Begin the first requests."""
        self._pool = pool
        self._waiting: deque[_Part] = deque(map(_Part, plan_requests(wanted)))
        self._parts: dict[tuple[int, int], list[_Part]] = {}
        for part in self._waiting:
            self._parts.setdefault((id(part.request.objects), part.request.file), []).append(part)
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.request.start)
        self._held: set[_Part] = set()
        self._begin()

    def __enter__(self) -> RangeFetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_here(self) -> bool:
        """Whether all bytes have come; begins the requests that there is room for now."""
        self._begin()
        return not self._waiting and all(part.coming is not None and part.coming.done() for part in self._held)

    def take(self, objects: OpenObjects, file: int, offset: int, num_bytes: int) -> bytes | None:
        """The bytes of a named range, which can be taken once; None if it was not named, or was taken already.

        Raises:
            SourceChanged, SourceUnreadable: As `OpenObjects.read`.
        """
        stop = offset + num_bytes
        needed: list[_Part] = []
        reached = offset
        for part in self._parts.get((id(objects), file), ()):
            if part.request.start > reached or reached >= stop:
                break
            if part.request.stop > reached:
                needed.append(part)
                reached = part.request.stop
        if reached < stop:
            return None
        pieces = []
        for part in needed:
            start = part.request.start
            content = self._wait(part)
            pieces.append(content[max(offset - start, 0) : stop - start])
            part.uses_left -= 1
            if not part.uses_left:
                self._drop(part)
        self._begin()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Drop unused bytes; requests under way run to their end, and their bytes are not counted."""
        self._waiting.clear()
        for part in list(self._held):
            self._drop(part)

    def _wait(self, part: _Part) -> bytes:
        if part.coming is None:
            self._waiting.remove(part)
            self._submit(part)
        assert part.coming is not None
        return part.coming.result()

    def _begin(self) -> None:
        """Begin requests while there is room, and always at least one."""
        while self._waiting:
            size = self._waiting[0].request.stop - self._waiting[0].request.start
            if self._held and self._pool.held_bytes + size > HELD_BYTES:
                return
            self._submit(self._waiting.popleft())

    def _submit(self, part: _Part) -> None:
        part.coming = self._pool.submit(part.request)
        self._held.add(part)
        self._pool.held_bytes += part.request.stop - part.request.start

    def _drop(self, part: _Part) -> None:
        self._held.discard(part)
        self._pool.held_bytes -= part.request.stop - part.request.start
        self._parts[id(part.request.objects), part.request.file].remove(part)
        if part.coming is not None:
            part.coming.cancel()
