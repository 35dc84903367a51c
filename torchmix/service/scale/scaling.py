"""Loaders that follow a run: started, given sources and ended as the rule decides."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from torchmix.errors import TorchmixError
from torchmix.service.endpoints import Registry, with_port
from torchmix.service.main import LoaderStart
from torchmix.service.pool import LoaderSeat, check_wanted, keeper_of_loaders
from torchmix.service.scale.loads import shared_cache
from torchmix.service.scale.partition import SourceLoad
from torchmix.service.scale.rule import RunNote, RunNotes, ScaleBounds, ScaleDecision, ScaleRule, follow_progress

# --- Loaders that follow a run: started, given sources and ended as the rule decides.
#
# What is done is what a replay of the rule over the notes decides; a loader that ends leaves the folder first, so that
# clients move their requests without a wait. Cost: a look at the notes each half second.

logger = logging.getLogger(__name__)

SCALING_NAME = "scaling.jsonl"
LEAVE_S = 3.0
"""From a loader's leaving the folder to its end, at least: clients look once a second."""
MOST_LEAVE_S = 120.0
"""At most: it ends once it owes nothing, and nobody waits longer for a reply."""
STARTS_AT_ONCE = 16
WHOLE_CACHE = 1 << 32
_NOT_REGISTERED: Mapping[str, int] = {"": 0}


class LoaderSeats(Protocol):
    """Where loaders run, each under a number."""

    def start(self, number: int, sources: Mapping[str, int], memory_bytes: int, cache_part: int) -> None:
        """Start a loader with parts of sources, and wait until it has registered; TorchmixError, OSError.

        Args:
            number: From 0; no loader of this number runs.
            sources: Its parts of each source, by name.
            memory_bytes: What it is to hold, its process included.
            cache_part: Its part of the cache, of 2^32.
        """
        ...

    def give(self, number: int, sources: Mapping[str, int]) -> None:
        """Change the parts of a loader."""
        ...

    def leave(self, number: int) -> None:
        """Take a loader from the folder."""
        ...

    def is_asked(self, number: int) -> bool:
        """Whether a loader owes somebody something, as far as is known."""
        ...

    def stop(self, number: int) -> None:
        """End a loader."""
        ...

    def look(self) -> None:
        """See to loaders that were lost."""
        ...


class SeatedLoaders:
    """The loaders of a node, or of all, as the last decision wants them."""

    def __init__(self, seats: LoaderSeats, bounds: ScaleBounds, *, node: int = 0, clock: Callable[[], float]) -> None:
        """Nothing is started.

        Args:
            seats: Where they run.
            bounds: How many there may be, on how many nodes.
            node: Which of these this is: it has each loader whose number is this one, modulo the nodes.
            clock: Seconds, of any zero.
        """
        self._seats, self._node, self._nodes, self._clock = seats, node, bounds.nodes, clock
        self._most = max(1, bounds.ceiling // bounds.nodes)
        self._num_first = 0
        """Loaders that began."""
        self._running: dict[int, Mapping[str, int]] = {}
        self._leaving: dict[int, float] = {}
        """When each that has left the folder may end, if it owes nothing."""

    def apply(self, decision: ScaleDecision, *, must: bool = False) -> None:
        """Start, end and tell those of this node as a decision says.

        Args:
            decision: Of all nodes.
            must: Whether each that cannot be started is an error; else it is tried again with the next decision.

        Raises:
            TorchmixError: A loader cannot start.
        """
        wanted = dict(list(enumerate(decision.loaders))[self._node :: self._nodes])
        for number in [number for number in wanted if number in self._leaving]:
            del self._leaving[number]  # it has not ended yet, and is needed again
            self._running[number] = _NOT_REGISTERED
        new = [number for number in wanted if number not in self._running]
        caches = dict(zip(new, self._cache_parts(new, [decision.page_bytes[number] for number in new]), strict=True))
        with ThreadPoolExecutor(STARTS_AT_ONCE, "torchmix-starts") as threads:
            started = [
                threads.submit(self._seats.start, number, wanted[number], decision.memory_bytes[number], caches[number])
                for number in new
            ]
        for number, done in zip(new, started, strict=True):
            error = done.exception()
            if error is None:
                self._running[number] = wanted[number]
            elif must or not isinstance(error, TorchmixError | OSError):
                raise error
            else:
                logger.warning("loader %d cannot be started: %s", number, error)
        for number, sources in wanted.items():
            if self._running.get(number, sources) != sources:
                self._seats.give(number, sources)
                self._running[number] = sources
        for number in [number for number in self._running if number not in wanted]:
            del self._running[number]
            self._seats.leave(number)
            self._leaving[number] = self._clock() + LEAVE_S

    def look(self) -> None:
        """See to lost loaders, and end those that have left long enough ago and have done what they were asked for."""
        self._seats.look()
        now = self._clock()
        for number in [number for number, due_s in self._leaving.items() if now >= due_s]:
            if not self._seats.is_asked(number) or now >= self._leaving[number] + MOST_LEAVE_S:
                del self._leaving[number]
                self._seats.stop(number)

    def close(self) -> None:
        """End all."""
        for number in [*self._running, *self._leaving]:
            self._seats.stop(number)
        self._running, self._leaving = {}, {}

    def _cache_parts(self, numbers: Sequence[int], page_bytes: Sequence[int]) -> list[int]:
        """Parts of the cache, of 2^32, for loaders that start; they keep them, and all there may be have the whole.

        Those that begin hold the pages of all sources until others come, so they have half of it at least, by their
        pages; others have even parts of the rest.
        """
        if not self._num_first:
            self._num_first = len(numbers)
            return shared_cache(self._first_cache, page_bytes)
        others = (WHOLE_CACHE - self._first_cache) // max(1, self._most - self._num_first)
        again = self._first_cache // self._num_first
        return [again if number // self._nodes < self._num_first else others for number in numbers]

    @property
    def _first_cache(self) -> int:
        """What the loaders that begin have together."""
        if self._num_first >= self._most:
            return WHOLE_CACHE
        return max(WHOLE_CACHE // 2, WHOLE_CACHE * self._num_first // self._most)


class ScaledLoaders:
    """The loaders of one run, or those of them that are of the first node."""

    def __init__(
        self,
        seats: LoaderSeats,
        loads_of: Callable[[int, int, RunNote], Sequence[SourceLoad]],
        bounds: ScaleBounds,
        folder: Path,
        *,
        clock: Callable[[], float],
        tell: Callable[[ScaleDecision], None] = lambda decision: None,
    ) -> None:
        """Start the loaders that a run needs at its first step.

        Args:
            seats: Where they run.
            loads_of: What steps cost, as `ScaleRule` takes it.
            bounds: How many there may be.
            folder: Where they register.
            clock: Seconds, of any zero.
            tell: Called with each decision before it is carried out.

        Raises:
            OptionError: The bounds do not hold the sources.
            TorchmixError: A loader cannot start.
        """
        self._seated = SeatedLoaders(seats, bounds, clock=clock)
        self._loads_of, self._bounds, self._tell = loads_of, bounds, tell
        self._progress = RunNotes(follow_progress(folder))
        self._log = folder / SCALING_NAME
        self._log.write_bytes(b"")
        self._rule = ScaleRule(loads_of, bounds, RunNote(step=0))
        self._at = 0
        self._carry_out(self._rule.decisions, must=True)

    def look(self) -> None:
        """Follow the run's notes, and see to its loaders."""
        is_begun = self._progress.look()
        notes = self._progress.notes
        if is_begun:
            self._rule, self._at = ScaleRule(self._loads_of, self._bounds, notes[0]), 0
        num_known = 0 if is_begun else len(self._rule.decisions)
        while notes and self._rule.next_step <= notes[-1].step:
            while self._at + 1 < len(notes) and notes[self._at + 1].step <= self._rule.next_step:
                self._at += 1
            self._rule.advance(notes[self._at])
        if new := self._rule.decisions[num_known:]:
            self._carry_out(new)
        self._seated.look()

    def close(self) -> None:
        """End all."""
        self._seated.close()

    def _carry_out(self, decisions: Sequence[ScaleDecision], *, must: bool = False) -> None:
        """Write down decisions, and do the last one: the steps of those before it have been asked for by now."""
        for decision in decisions:
            with self._log.open("ab") as file:
                line = {"step": decision.step, "reason": decision.reason, "loaders": decision.loaders}
                file.write(msgspec.json.encode(line) + b"\n")
            logger.info("step %d, %s: %d loaders", decision.step, decision.reason, len(decision.loaders))
        self._tell(decisions[-1])
        self._seated.apply(decisions[-1], must=must)


# --- Loaders of this machine, each of which can be started and ended alone.
#
# Cost: a process for each.


class LocalSeats:
    """A process for each number."""

    def __init__(
        self, start: LoaderStart, registry: Registry, is_over: threading.Event, *, shared_cpu: int = 0
    ) -> None:
        """Nothing is started.

        Args:
            start: What all are told; their ports count up from its own, as sockets in the folder of its `near` do, and
                they share its cache.
            registry: Where they are registered, with the public key that they share.
            is_over: Set where nobody wants them any more, while they start.
            shared_cpu: Processors of which each has the part that it has of the cache, where that is more than the
                start says: a loader that is alone may use more than one of many.
        """
        self._start, self._registry, self._is_over, self._shared_cpu = start, registry, is_over, shared_cpu
        self._keeper = keeper_of_loaders()
        self._seats: dict[int, LoaderSeat] = {}

    @property
    def endpoints(self) -> list[str]:
        """Where those that run listen, by number."""
        return [self._seats[number].told.bind for number in sorted(self._seats)]

    def start(self, number: int, sources: Mapping[str, int], memory_bytes: int, cache_part: int) -> None:
        """See `LoaderSeats`."""
        port = self._start.metrics_port
        start = msgspec.structs.replace(
            self._start,
            bind=with_port(self._start.bind, number),
            near=f"{self._start.near}/{number}" if self._start.near else "",
            metrics_port=port + number if port else 0,
            cache_bytes=self._start.cache_bytes * cache_part >> 32,
            cpu=max(self._start.cpu, self._shared_cpu * cache_part >> 32),
        )
        seat = LoaderSeat(start)
        self._keeper.add([seat], check=lambda: check_wanted(self._is_over))
        self._seats[number] = seat
        self.give(number, sources)

    def give(self, number: int, sources: Mapping[str, int]) -> None:
        """See `LoaderSeats`."""
        told = self._seats[number].told
        self._registry.put(told.bind, sources, "" if told.own is None else told.own.public, told.near)

    def leave(self, number: int) -> None:
        """See `LoaderSeats`."""
        self._registry.remove(self._seats[number].told.bind)

    def is_asked(self, number: int) -> bool:
        """See `LoaderSeats`."""
        return self._seats[number].is_asked

    def stop(self, number: int) -> None:
        """See `LoaderSeats`."""
        self.leave(number)
        self._keeper.remove(self._seats.pop(number))

    def look(self) -> None:
        """See `LoaderSeats`."""
        self._keeper.look()
        self._registry.look()
