"""Requests for all loaders together: who is asked, how much at a time, and who is asked next when one does not answer.

A reply is used once, whoever sends it and however often, and only for the request that it carries the checksum of; a
loader is never asked for more than its window; a request goes to the next owner when its loader has gone, says nothing,
fails, or is slow, and what is asked twice only because a loader is slow stays within 5 % of all requests. What two
loaders say of the data is raised; whatever else all of them fail with is `LoaderLost`, which names them. Cost: some 50
microseconds a request.

A loader counts as *silent* when it does not answer pings; it answers them while it reads. It is *slow* when a reply
takes ten times as long as its replies of as many bytes do, and 2 s at least. What is asked twice is work done twice, so
it is asked of a loader that owes nothing. Time in which this process itself did not run counts for
neither.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import CatalogError, LoaderLost, WireError
from torchmix.service.members import GREET_S, PING_S, FleetMember, FleetMembers
from torchmix.service.messages import (
    MOST_PAGES,
    MOST_REASON,
    WINDOW_BYTES,
    Arrays,
    BusyReply,
    FailureReply,
    LoaderPing,
    LoaderPong,
    LoaderRefusal,
    PagesAhead,
    PieceReply,
    PieceRequest,
    forms_of,
    one_line,
)
from torchmix.service.routing import ranking

if TYPE_CHECKING:
    from torchmix.service.client import Said

logger = logging.getLogger(__name__)

EXTRA_REQUESTS = 0.05
"""Part of all requests that may be asked twice because a loader is slow."""
SLOW_S = 2.0
SLOW_TIMES = 10
REQUEST_S = 1.0
"""What a loader does in so long is one request, and twice as much is on its way: the rest goes to whoever has come
meanwhile."""
LEAST_BYTES = 1 << 16
"""A smaller request takes as long as one of so many."""
BUSY_S = 0.05
NEWS_S = 5.0
"""Between two pings of a loader that owes nothing."""
MOST_BUSY_S = 1.0
MOST_BUSY = 4
"""After so many times another loader is asked."""
MOST_ASKED = 64
"""Times that a request is asked, before no loader counts as one that answers it."""


class Asked(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One request: what fits a message, all of it of neighbouring pages of one owner."""

    run: int
    """Hash of the first page run; decides who is asked."""
    arrays: Mapping[str, NDArray[Any]]
    """The arrays of a `PieceRequest`."""
    source: int = 0
    """The source of its first piece; its loaders are asked first."""
    num_bytes: int
    """Planned."""


class LoaderFleet:
    """All loaders, as one client sees them; used by one thread."""

    def __init__(self, members: FleetMembers) -> None:
        """Closes `members` with `close`."""
        self.members = members
        self._number = 0
        self._counts = dict.fromkeys(("requests", "reasked", "hedged", "duplicates", "busy", "damaged", "failed"), 0)

    def fetch(self, asked: Sequence[Asked], take: Callable[[int, Arrays], None]) -> None:
        """Ask for all of `asked`.

        Args:
            asked: Requests.
            take: Called with the place of a request and the arrays of its reply, as they come; once for each that it
                does not refuse by WireError.

        Raises:
            CatalogError: The data of a request cannot be read, by two loaders if there are two.
            LoaderLost: No loader answers, or all that do fail otherwise at a request.
        """
        self.members.begin()
        call = _Call(asked, take)
        try:
            while call.num_left:
                self._send_waiting(call)
                if not self.members.names:
                    self.members.check_some_answer()
                for said in self.members.turn(BUSY_S if call.is_put_off else PING_S):
                    self._settle(call, said)
                self._watch(call)
        finally:
            for number in list(call.flights):
                self._land(call, number)

    def look(self, *, greets: bool = False) -> int:
        """How many loaders answer; takes note of what has come since the last call.

        Args:
            greets: Whether loaders that have just come are waited for, a moment; else nothing is.
        """
        self.members.begin()
        wait_s = 0.0
        while True:
            for said in self.members.turn(wait_s):
                self._counts["duplicates"] += isinstance(said.message, PieceReply)
            if not greets or not self.members.is_greeting:
                return len(self.members.names)
            wait_s = GREET_S / 10

    def request_bytes(self, owner: str) -> int:
        """How many bytes a request to a loader is to have, at most, for the time that it takes."""
        one = self.members.all.get(owner)
        return WINDOW_BYTES if one is None else self._bytes_within(one, REQUEST_S)

    def _byte_s(self, one: FleetMember) -> float:
        """Time for each byte of a loader; of one that has not replied yet, that of the slowest; 0: nobody has."""
        return one.byte_s or max(other.byte_s for other in self.members.all.values())

    def _bytes_within(self, one: FleetMember, seconds: float) -> int:
        """What a loader is likely to do in a time."""
        byte_s = self._byte_s(one)
        return max(LEAST_BYTES, int(seconds / byte_s)) if byte_s * WINDOW_BYTES > seconds else WINDOW_BYTES

    def tell(self, owner: str, source: int, pages: NDArray[np.int64], *, is_over: bool) -> None:
        """Say to a loader that pages will be needed, or are not needed any more; it may not hear it."""
        one = self.members.all.get(owner)
        if one is None or one.state != "ready":
            return
        for start in range(0, len(pages), MOST_PAGES):
            arrays = {"page": pages[start : start + MOST_PAGES]}
            message = PagesAhead(source=source, is_over=is_over, forms=forms_of(arrays))
            self.members.links.send(owner, message, arrays)

    def stats(self) -> dict[str, int | float]:
        """Counts since the start."""
        counts = {f"total_loader_{name}": count for name, count in self._counts.items()}
        return {**counts, "loaders_ready": len(self.members.names), "loaders_known": len(self.members.all)}

    def close(self) -> None:
        """End all connections; may be called again."""
        self.members.links.close()

    def _send_waiting(self, call: _Call) -> None:
        now, later = self.members.clock(), deque[int]()
        call.is_put_off = False
        while call.waiting and self.members.names:
            k = call.waiting.popleft()
            if call.is_done[k]:
                continue
            one = self._next_owner(call, k)
            room = min(one.window_bytes, self._bytes_within(one, 2 * REQUEST_S))
            fits = not one.in_flight or one.in_flight_bytes + call.asked[k].num_bytes <= room
            is_put_off = call.not_before_s[k] > now
            call.is_put_off |= is_put_off
            if is_put_off or not fits or not self._send(call, k, one):
                later.append(k)
        call.waiting.extendleft(reversed(later))

    def _next_owner(self, call: _Call, k: int) -> FleetMember:
        """The first ready loader, by the request's ranking, that has not failed at it or is not being asked."""
        asked, members = call.asked[k], self.members
        ranked = ranking(asked.run, members.keys, members.routes.of_source(asked.source))
        order = [members.all[members.names[m]] for m in ranked]
        able = [one for one in order if one.endpoint not in call.failures[k]] or order
        free = [one for one in able if one.endpoint not in call.avoided[k]]
        if not free:  # all were asked in vain: from the first one again
            call.avoided[k].clear()
        return (free or able)[0]

    def _send(self, call: _Call, k: int, one: FleetMember) -> bool:
        asked = call.asked[k]
        self._number += 1
        message = PieceRequest(
            number=self._number,
            patience_ms=int(self.members.patience.reply_s * 1000),
            forms=forms_of(asked.arrays),
        )
        checksum = self.members.links.send(one.endpoint, message, asked.arrays)
        if checksum is None:
            return False
        call.num_asked[k] += 1
        if call.num_asked[k] > MOST_ASKED:
            raise LoaderLost(f"a request was asked {MOST_ASKED} times without a reply, of {one.endpoint} last")
        now = self.members.clock()
        if not one.in_flight:
            one.heard_s = max(one.heard_s, now)
        one.in_flight[self._number] = now
        one.in_flight_bytes += asked.num_bytes
        call.flights[self._number] = _Flight(k, one, checksum)
        self._counts["requests"] += 1
        return True

    def _settle(self, call: _Call, said: Said) -> None:
        """Take note of a reply that was waited for, or that none will come."""
        one = self.members.all[said.endpoint]
        if said.news == "gone":
            self._ask_others(call, list(one.in_flight))
            return
        if said.news == "damaged":  # if it was a reply, the next pong shows that it is missing
            self._counts["damaged"] += 1
            logger.warning("loader %s: %s", one.endpoint, said.reason)
            return
        if isinstance(said.message, LoaderPong):
            if said.message.owed == 0:
                is_last = said.message.number == one.num_pings - 1
                lost = [number for number, sent_s in one.in_flight.items() if is_last and sent_s < one.pinged_s]
                self._ask_others(call, lost)
            return
        if isinstance(said.message, LoaderRefusal):  # it has forgotten this client
            self._ask_others(call, list(one.in_flight))
            return
        message = said.message
        assert isinstance(message, PieceReply | FailureReply | BusyReply)
        flight = call.flights.get(message.number)
        if flight is None or flight.one is not one or call.is_done[flight.k]:
            self._counts["duplicates"] += 1
            return
        k = flight.k
        sent_s = self._land(call, message.number)
        if isinstance(message, BusyReply):
            self._counts["busy"] += 1
            call.num_busy[k] += 1
            wait_s = min(MOST_BUSY_S, BUSY_S * 2 ** min(call.num_busy[k], 8))
            call.not_before_s[k] = self.members.clock() + wait_s
            if call.num_busy[k] >= MOST_BUSY:
                call.avoided[k].add(one.endpoint)
            call.num_asked[k] -= 1  # it is asked in vain as long as loaders are busy
            call.waiting.append(k)
            return
        if isinstance(message, FailureReply):
            self._fail(call, k, one, message.error.error())
            return
        try:
            if message.request != flight.checksum:
                raise WireError("what came is the reply to another request")
            call.take(k, said.arrays)
        except WireError as error:
            self._fail(call, k, one, error)
            return
        now = self.members.clock()
        byte_s = (now - max(sent_s, one.replied_s)) / max(call.asked[k].num_bytes, LEAST_BYTES)
        one.replied_s = now
        one.byte_s += (0.5 if byte_s > one.byte_s else 0.1) * (byte_s - one.byte_s)
        for number in [number for number, other in call.flights.items() if other.k == k]:
            self._land(call, number)
        call.is_done[k] = True
        call.num_left -= 1

    def _fail(self, call: _Call, k: int, one: FleetMember, error: Exception) -> None:
        """A loader has failed at a request: ask the next one, or raise."""
        self._counts["failed"] += 1
        logger.warning("loader %s cannot answer a request: %s", one.endpoint, one_line(str(error), MOST_REASON))
        failures = call.failures[k]
        is_told_twice = any(isinstance(other, CatalogError) for other in failures.values())
        failures[one.endpoint] = error
        is_last = failures.keys() >= set(self.members.names)
        if isinstance(error, CatalogError) and (is_told_twice or is_last):
            raise error
        if is_last:
            words = "; ".join(f"{endpoint}: {type(one).__name__}: {one}" for endpoint, one in failures.items())
            raise LoaderLost(f"no loader can answer a request: {words}") from error
        self._ask_again(call, k)

    def _ask_again(self, call: _Call, k: int) -> None:
        if not any(other.k == k for other in call.flights.values()):
            self._counts["reasked"] += 1
            call.waiting.append(k)

    def _land(self, call: _Call, number: int) -> float:
        """Wait for a request no more; when it was sent."""
        k, one, _ = call.flights.pop(number)
        one.in_flight_bytes -= call.asked[k].num_bytes
        return one.in_flight.pop(number)

    def _ask_others(self, call: _Call, numbers: Sequence[int]) -> None:
        """Ask the next owners for requests that no reply comes to."""
        for number in numbers:
            k, one, _ = call.flights[number]
            self._land(call, number)
            call.avoided[k].add(one.endpoint)
            self._ask_again(call, k)

    def _watch(self, call: _Call) -> None:
        """Ping loaders that owe something, and ask others where one is silent or slow."""
        now = self.members.clock()
        for one in list(self.members.all.values()):
            is_owing = one.in_flight or one.state == "silent"
            # A loader is asked for news, too: when it is lost, its log is known but for the last few seconds.
            is_due = now - max(one.heard_s, one.pinged_s) > PING_S if is_owing else now - one.pinged_s > NEWS_S
            if is_due and one.state in ("ready", "silent"):
                one.pinged_s = now
                self.members.links.send(one.endpoint, LoaderPing(number=one.num_pings))
                one.num_pings += 1
            if not one.in_flight:
                continue
            if now - one.heard_s > self.members.patience.silence_s:
                self.members.set_state(one, "silent", f"silent for {now - one.heard_s:.1f} s")
                self._ask_others(call, list(one.in_flight))
                continue
            byte_s = self._byte_s(one)
            for number, sent_s in list(one.in_flight.items()):
                k = call.flights[number].k
                slow_s = max(SLOW_S, SLOW_TIMES * byte_s * max(call.asked[k].num_bytes, LEAST_BYTES))
                if now - sent_s > self.members.patience.reply_s:  # a loader that keeps its word has dropped it
                    self._ask_others(call, [number])
                elif now - sent_s > slow_s and len(self.members.names) > 1:
                    self._hedge(call, k, one)

    def _hedge(self, call: _Call, k: int, one: FleetMember) -> None:
        """Ask one more loader for what a slow one owes, within bounds: one that has nothing else to do."""
        is_too_much = self._counts["hedged"] + 1 > 1 + EXTRA_REQUESTS * self._counts["requests"]
        if is_too_much or sum(other.k == k for other in call.flights.values()) > 1:
            return
        call.avoided[k].add(one.endpoint)
        other = self._next_owner(call, k)
        if not other.in_flight and self._send(call, k, other):
            self._counts["hedged"] += 1


class _Flight(NamedTuple):
    """A request that is under way."""

    k: int
    one: FleetMember
    checksum: int
    """What the frames carry."""


class _Call:
    """The requests of one `fetch`."""

    def __init__(self, asked: Sequence[Asked], take: Callable[[int, Arrays], None]) -> None:
        self.asked, self.take = asked, take
        self.num_left = len(asked)
        self.waiting = deque(range(len(asked)))
        self.is_put_off = False
        """Whether a request waits because a loader was busy."""
        self.is_done = [False] * len(asked)
        self.failures: list[dict[str, Exception]] = [{} for _ in asked]
        """What loaders have failed with."""
        self.num_asked = [0] * len(asked)
        self.avoided: list[set[str]] = [set() for _ in asked]
        """Loaders that others are asked instead of."""
        self.num_busy = [0] * len(asked)
        self.not_before_s = [0.0] * len(asked)
        self.flights: dict[int, _Flight] = {}
        """By number."""
