"""Requests for all loaders together: who is asked, how much at a time, and who is asked next when one does not answer.

In: requests, each with the page run that it begins with. Out: their replies, in any order, each once. Must hold: a
reply is used once, whoever sends it and however often; a loader is never asked for more than its window; a request goes
to the next owner when its loader has gone, says nothing, or is slow, and what is asked twice only because a loader is
slow stays within 5 % of all requests. Cost: some 50 microseconds a request.

A loader counts as *silent* when it does not answer pings; it answers them while it reads. It is *slow* when a reply
takes ten times as long as its replies do, and 2 s at least. Time in which this process itself did not run counts for
neither.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import CatalogError
from torchmix.service.members import PING_S, FleetMember, FleetMembers
from torchmix.service.messages import (
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
)
from torchmix.service.routing import ranking

if TYPE_CHECKING:  # ZeroMQ is loaded where loaders are asked
    from torchmix.service.client import Said

logger = logging.getLogger(__name__)

EXTRA_REQUESTS = 0.05
"""Part of all requests that may be asked twice because a loader is slow."""
SLOW_S = 2.0
SLOW_TIMES = 10
BUSY_S = 0.05
NEWS_S = 5.0
"""Between two pings of a loader that owes nothing."""
MOST_BUSY_S = 1.0


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

    def fetch(self, asked: Sequence[Asked]) -> Iterator[tuple[int, Arrays]]:
        """Replies to requests, as they come: the place of the request, and its arrays.

        Raises:
            CatalogError, PlanError: A request cannot be answered, by two loaders if there are two.
            LoaderLost: No loader answers.
        """
        self.members.begin()
        call = _Call(asked)
        try:
            while call.num_left:
                self._send_waiting(call)
                if not self.members.names:
                    self.members.check_some_answer()
                for said in self.members.turn(BUSY_S if call.is_put_off else PING_S):
                    reply = self._settle(call, said)
                    if reply is not None:
                        yield reply
                self._watch(call)
        finally:
            for number in list(call.flights):
                self._land(call, number, is_settled=True)

    def look(self) -> int:
        """How many loaders answer; takes note of what has come since the last call, and waits for nothing."""
        self.members.begin()
        for said in self.members.turn(0.0):
            self._counts["duplicates"] += isinstance(said.message, PieceReply)
        return len(self.members.names)

    def tell(self, owner: str, source: int, pages: NDArray[np.int64], *, is_over: bool) -> None:
        """Say to a loader that pages will be needed, or are not needed any more; it may not hear it."""
        one = self.members.all.get(owner)
        if one is None or one.state != "ready":
            return
        arrays = {"page": pages}
        message = PagesAhead(settled_bytes=one.settled_bytes, source=source, is_over=is_over, forms=forms_of(arrays))
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
            fits = not one.in_flight or one.in_flight_bytes + call.asked[k].num_bytes <= one.window_bytes
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
        return next((one for one in order if one.endpoint not in call.avoided[k]), order[0])

    def _send(self, call: _Call, k: int, one: FleetMember) -> bool:
        asked = call.asked[k]
        self._number += 1
        message = PieceRequest(
            number=self._number,
            settled_bytes=one.settled_bytes,
            patience_ms=int(self.members.patience.reply_s * 1000),
            forms=forms_of(asked.arrays),
        )
        if not self.members.links.send(one.endpoint, message, asked.arrays):
            return False
        now = self.members.clock()
        if not one.in_flight:
            one.heard_s = max(one.heard_s, now)
        one.in_flight[self._number] = now
        one.in_flight_bytes += asked.num_bytes
        call.flights[self._number] = (k, one)
        self._counts["requests"] += 1
        return True

    def _settle(self, call: _Call, said: Said) -> tuple[int, Arrays] | None:
        """A reply that was waited for; None for all else."""
        one = self.members.all[said.endpoint]
        if said.news == "gone":
            self._ask_others(call, list(one.in_flight))
            return None
        if said.news == "damaged":  # if it was a reply, the next pong shows that it is missing
            self._counts["damaged"] += 1
            logger.warning("loader %s: %s", one.endpoint, said.reason)
            return None
        if isinstance(said.message, LoaderPong):
            if said.message.owed == 0:
                is_last = said.message.number == one.num_pings - 1
                lost = [number for number, sent_s in one.in_flight.items() if is_last and sent_s < one.pinged_s]
                self._ask_others(call, lost, again=True)
            return None
        if isinstance(said.message, LoaderRefusal):  # it has forgotten this client
            self._ask_others(call, list(one.in_flight), again=True)
            return None
        message = said.message
        assert isinstance(message, PieceReply | FailureReply | BusyReply)
        flight = call.flights.get(message.number)
        if flight is None or flight[1] is not one or call.is_done[flight[0]]:
            self._counts["duplicates"] += 1
            return None
        k = flight[0]
        sent_s = self._land(call, message.number, is_settled=not isinstance(message, BusyReply))
        if isinstance(message, BusyReply):
            self._counts["busy"] += 1
            call.num_busy[k] += 1
            wait_s = min(MOST_BUSY_S, BUSY_S * 2 ** min(call.num_busy[k], 8))
            call.not_before_s[k] = self.members.clock() + wait_s
            call.waiting.append(k)
            return None
        if isinstance(message, FailureReply):
            self._counts["failed"] += 1
            error = message.error.error()
            is_first = not call.failed[k]
            call.failed[k] = True
            call.avoided[k].add(one.endpoint)
            if not (isinstance(error, CatalogError) and is_first and len(self.members.names) > 1):
                raise error
            logger.warning("loader %s: %s; another one is asked", one.endpoint, error)
            self._counts["reasked"] += 1
            call.waiting.append(k)
            return None
        one.reply_s += 0.1 * (self.members.clock() - sent_s - one.reply_s)
        for number in [number for number, (other, _) in call.flights.items() if other == k]:
            self._land(call, number, is_settled=True)
        call.is_done[k] = True
        call.num_left -= 1
        return k, said.arrays

    def _land(self, call: _Call, number: int, *, is_settled: bool) -> float:
        """Wait for a request no more; when it was sent."""
        k, one = call.flights.pop(number)
        num_bytes = call.asked[k].num_bytes
        one.in_flight_bytes -= num_bytes
        if is_settled:
            one.settled_bytes += num_bytes
        return one.in_flight.pop(number)

    def _ask_others(self, call: _Call, numbers: Sequence[int], *, again: bool = False) -> None:
        """Ask the next owners for requests that no reply comes to; with `again` the same loaders may be asked."""
        for number in numbers:
            k, one = call.flights[number]
            self._land(call, number, is_settled=True)
            if not again:
                call.avoided[k].add(one.endpoint)
            if not any(other == k for other, _ in call.flights.values()):
                self._counts["reasked"] += 1
                call.waiting.append(k)

    def _watch(self, call: _Call) -> None:
        """Ping loaders that owe something, and ask others where one is silent or slow."""
        now = self.members.clock()
        for one in list(self.members.all.values()):
            is_owing = one.in_flight or one.state == "silent"
            # A loader is asked for news, too: when it is lost, its log is known but for the last few seconds.
            is_due = now - max(one.heard_s, one.pinged_s) > PING_S if is_owing else now - one.pinged_s > NEWS_S
            if is_due and one.state in ("ready", "silent"):
                one.pinged_s = now
                self.members.links.send(one.endpoint, LoaderPing(number=one.num_pings, settled_bytes=one.settled_bytes))
                one.num_pings += 1
            if not one.in_flight:
                continue
            if now - one.heard_s > self.members.patience.silence_s:
                self.members.set_state(one, "silent", f"silent for {now - one.heard_s:.1f} s")
                self._ask_others(call, list(one.in_flight))
                continue
            slow_s = max(SLOW_S, SLOW_TIMES * one.reply_s)
            for number, sent_s in list(one.in_flight.items()):
                if now - sent_s > slow_s and len(self.members.names) > 1:
                    self._hedge(call, call.flights[number][0], one)

    def _hedge(self, call: _Call, k: int, one: FleetMember) -> None:
        """Ask one more loader for what a slow one owes, within bounds."""
        is_too_much = self._counts["hedged"] + 1 > 1 + EXTRA_REQUESTS * self._counts["requests"]
        if is_too_much or sum(other == k for other, _ in call.flights.values()) > 1:
            return
        call.avoided[k].add(one.endpoint)
        if self._send(call, k, self._next_owner(call, k)):
            self._counts["hedged"] += 1


class _Call:
    """The requests of one `fetch`."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.asked = asked
        self.num_left = len(asked)
        self.waiting = deque(range(len(asked)))
        self.is_put_off = False
        """Whether a request waits because a loader was busy."""
        self.is_done = [False] * len(asked)
        self.failed = [False] * len(asked)
        self.avoided: list[set[str]] = [set() for _ in asked]
        """Loaders that others are asked instead of."""
        self.num_busy = [0] * len(asked)
        self.not_before_s = [0.0] * len(asked)
        self.flights: dict[int, tuple[int, FleetMember]] = {}
        """By number: the place of the request, and who was asked."""
