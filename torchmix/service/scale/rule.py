"""When loaders are started, ended and given other sources: a pure rule over the load that is coming."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import msgspec

from torchmix.errors import OptionError
from torchmix.service.scale.partition import (
    LoaderBudget,
    LoaderPlace,
    Partition,
    SourceLoad,
    bytes_of_process,
    partition,
)

# --- When loaders are started, ended and given other sources: a pure rule over the load that is coming.
#
# The same load and the same notes give the same decisions, wherever and whenever they are worked out; there are never
# more loaders than `most`, the processors or the memory allow; a decision needs several intervals in a row that ask
# for it. Cost: the loads of an interval, once, and a partition for each decision.
#
# The load of an interval is that of windows of steps: means over what is asked for next, and over what comes after it.
# A window is as long as the block of steps that clients ask for at once, since the loaders that are there then read all
# of it. More loaders come where one of the next two windows wants them, and as many as the costliest of the next
# `WINDOWS` wants, so that pages move to other loaders once and not with each step of a rise. Loaders end where none of
# these windows wants them, and neither does the block that was asked for last: it may be under way. `unit` is the work
# of a step that one loader is to have: that of the run's first intervals over the fewest loaders, since these are
# declared to suffice for them.
#
# After MegaScale-Data, section 5.2, where the moving average is over past shares.

EVERY_STEPS = 10
"""Steps of an interval."""
AHEAD = 3
"""Intervals of a window, where blocks are not longer."""
NEXT = 2
"""Windows to come, one of which is to want more loaders."""
WINDOWS = 4
"""Windows to come that say how many."""
CONSECUTIVE = 2
"""Intervals in a row that ask for the same before it is done."""
OVER = Fraction(9, 8)
"""More loaders, where they have more than this much of the work that they are to have."""
UNDER = Fraction(3, 4)
"""Fewer, where they have less than this."""
UNEVEN = Fraction(3, 2)
"""Other sources for each, where the slowest has more than this much of the mean."""

Reason = Literal["begin", "more", "fewer", "uneven"]


class RunNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has decided by a step, beside what its recipe says."""

    step: int
    """The one after those that are asked for next."""
    gone: frozenset[str] = frozenset()
    """Streams that have run out."""
    decided: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Shares that a policy has given the children of its group."""


class ScaleBounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many loaders there may be."""

    least: int
    most: int
    budget: LoaderBudget
    nodes: int = 1
    """Each of so many nodes has as many of them."""
    beside: int = 0
    """Nodes that read themselves, as much as a loader each, before they ask loaders."""
    block_steps: int = 1
    """Steps that clients ask for at once, at most; see `steps_of_block`."""

    @property
    def ceiling(self) -> int:
        """There are never more: by the user's word and by the processors."""
        return max(self.least, min(self.most, self.budget.most_processes) // self.nodes * self.nodes)


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What loaders do from a step on."""

    step: int
    reason: Reason
    loaders: tuple[Mapping[str, int], ...]
    """Parts of each source that each has, by name."""
    memory_bytes: tuple[int, ...]
    """What each is to hold, its process included."""
    page_bytes: tuple[int, ...]
    """Decoded pages in that."""


class ScaleRule:
    """The decisions of a run, interval by interval."""

    def __init__(
        self, loads_of: Callable[[int, int, RunNote], Sequence[SourceLoad]], bounds: ScaleBounds, first: RunNote
    ) -> None:
        """Decide for the interval of a run's first step.

        Args:
            loads_of: The loads of steps [start, stop) by a note, mean a step; pure.
            bounds: How many loaders there may be.
            first: The note that the run begins with.

        Raises:
            OptionError: `least` loaders are more than the budget allows, or do not hold the sources.
        """
        self._loads_of, self._bounds = loads_of, bounds
        first_steps = loads_of(0, AHEAD * EVERY_STEPS, RunNote(step=0))
        self._unit = Fraction(max(1, _total(first_steps)), bounds.least + bounds.beside)
        self._interval = self._first = first.step // EVERY_STEPS
        self._notes = deque([first], maxlen=AHEAD + 1)
        self._over = self._under = self._uneven = 0
        coming = self._coming(WINDOWS, first)
        soon = _costliest(coming[: 2 * NEXT - 1])
        loads = _costliest(coming) if self._wanted(soon) > bounds.least else soon
        found = self._largest(loads, self._wanted(loads), bounds.least - 1)
        if found is None:
            found = partition(loads, bounds.budget, processes=bounds.least)
        self._places: tuple[Mapping[str, int], ...] = ()
        self.decisions: list[ScaleDecision] = []
        self._decide(self._interval * EVERY_STEPS, "begin", found, loads)

    @property
    def next_step(self) -> int:
        """The first step of the next interval: `advance` wants the note that holds there."""
        return (self._interval + 1) * EVERY_STEPS

    def advance(self, note: RunNote) -> ScaleDecision | None:
        """Go on to the next interval; the decision that holds from its first step on, if there is one.

        Args:
            note: The newest with a step of at most `next_step`.
        """
        self._interval += 1
        self._notes.append(note)
        coming = self._coming(WINDOWS, note)
        soon, most = _costliest(coming[: 2 * NEXT - 1]), _costliest([*coming, self._asked()])
        count, ratio = len(self._places), self._ratio(soon)
        work = self._unit * (count + self._bounds.beside)
        self._over = self._over + 1 if _total(soon) > OVER * work else 0
        self._under = self._under + 1 if _total(most) < UNDER * work else 0
        # Where even the slowest has no more than it is to have, nobody waits for it, and moving pages would cost.
        self._uneven = self._uneven + 1 if ratio > UNEVEN and ratio * _total(soon) > OVER * work else 0
        step, wanted = self._interval * EVERY_STEPS, self._wanted(most)
        if self._over >= CONSECUTIVE and wanted > count:
            found = self._largest(most, wanted, count)
            if found is not None:
                return self._decide(step, "more", found, most)
        if self._under >= CONSECUTIVE and wanted < count:
            found = self._smallest(most, wanted, count)
            if found is not None:
                return self._decide(step, "fewer", found, most)
        if self._uneven >= CONSECUTIVE:
            found = _or_none(soon, self._bounds.budget, count)
            if found is not None and found.ratio * Fraction(5, 4) < ratio:
                return self._decide(step, "uneven", found, soon)
        return None

    def _coming(self, count: int, note: RunNote) -> list[Sequence[SourceLoad]]:
        """The mean loads of so many windows from this interval on, and of those that lie half in one and half in the
        next: where a block begins is not known here. The first blocks of a run are shorter."""
        start, done = self._interval * EVERY_STEPS, (self._interval - self._first) * EVERY_STEPS
        width = max(AHEAD * EVERY_STEPS, min(self._bounds.block_steps, done + 1))
        starts = [start + width * half // 2 for half in range(2 * count - 1)]
        return [self._loads_of(at, at + width, note) for at in starts]

    def _asked(self) -> Sequence[SourceLoad]:
        """The mean load of the block that was asked for last, by the note that held then."""
        stop, done = self._interval * EVERY_STEPS, (self._interval - self._first) * EVERY_STEPS
        width = min(done, max(AHEAD * EVERY_STEPS, min(self._bounds.block_steps, done // 2 + 1)))
        return self._loads_of(stop - width, stop, self._notes[0])

    def _wanted(self, loads: Sequence[SourceLoad]) -> int:
        """Loaders that have a unit of work each, within the bounds."""
        count, nodes = int(-(-Fraction(_total(loads)) // self._unit)) - self._bounds.beside, self._bounds.nodes
        return max(self._bounds.least, min(-(-count // nodes) * nodes, self._bounds.ceiling))

    def _largest(self, loads: Sequence[SourceLoad], wanted: int, count: int) -> Partition | None:
        """The largest fleet of (count, wanted] that the budget allows."""
        tries = (_or_none(loads, self._bounds.budget, number) for number in range(wanted, count, -self._bounds.nodes))
        return next((found for found in tries if found is not None), None)

    def _smallest(self, loads: Sequence[SourceLoad], wanted: int, count: int) -> Partition | None:
        """The smallest fleet of [wanted, count) that holds the sources."""
        tries = (_or_none(loads, self._bounds.budget, number) for number in range(wanted, count, self._bounds.nodes))
        return next((found for found in tries if found is not None), None)

    def _ratio(self, loads: Sequence[SourceLoad]) -> Fraction:
        """Work of the slowest of the present loaders over the mean."""
        parts: dict[str, int] = {}
        for place in self._places:
            for name, count in place.items():
                parts[name] = parts.get(name, 0) + count
        cost = {load.name: load.cost for load in loads}
        work = [
            sum(Fraction(cost[name] * count, parts[name]) for name, count in place.items()) for place in self._places
        ]
        total = sum(work)
        return max(work) * len(work) / total if total else Fraction(1)

    def _decide(self, step: int, reason: Reason, found: Partition, loads: Sequence[SourceLoad]) -> ScaleDecision:
        self._places = matched(self._places, found.loaders)
        self._over = self._under = self._uneven = 0
        memory = tuple(_memory_of(place, self._places, loads) for place in self._places)
        pages = tuple(_pages_of(place, self._places, loads) for place in self._places)
        decision = ScaleDecision(step=step, reason=reason, loaders=self._places, memory_bytes=memory, page_bytes=pages)
        self.decisions.append(decision)
        return decision


def replay(
    loads_of: Callable[[int, int, RunNote], Sequence[SourceLoad]],
    bounds: ScaleBounds,
    notes: Sequence[RunNote],
    stop: int,
) -> list[ScaleDecision]:
    """The decisions before a step of a run whose notes are known.

    Args:
        loads_of: As of `ScaleRule`.
        bounds: Likewise.
        notes: One or more, of rising steps; the first is that of the run's beginning.
        stop: The step.
    """
    rule, at = ScaleRule(loads_of, bounds, notes[0]), 0
    while rule.next_step < stop:
        while at + 1 < len(notes) and notes[at + 1].step <= rule.next_step:
            at += 1
        rule.advance(notes[at])
    return rule.decisions


def matched(before: Sequence[Mapping[str, int]], places: Sequence[LoaderPlace]) -> tuple[Mapping[str, int], ...]:
    """New places, each at the number of the loader that has most of its parts already, so that few pages move.

    Numbers beyond the new count are those of loaders that end; a new loader has the next free number.
    """
    left = [dict(sorted(place.parts.items())) for place in places]
    found: list[Mapping[str, int]] = []
    for old in before[: len(left)]:
        best = max(range(len(left)), key=lambda k: (sum(min(n, old.get(name, 0)) for name, n in left[k].items()), -k))
        found.append(left.pop(best))
    return (*found, *left)


def _memory_of(place: Mapping[str, int], places: Sequence[Mapping[str, int]], loads: Sequence[SourceLoad]) -> int:
    """What a loader holds: its process, the states of its sources, and its part of their pages."""
    states = sum(load.state_bytes for load in loads if load.name in place)
    return bytes_of_process(loads) + states + _pages_of(place, places, loads)


def _pages_of(place: Mapping[str, int], places: Sequence[Mapping[str, int]], loads: Sequence[SourceLoad]) -> int:
    """A loader's part of the decoded pages of its sources."""
    held = 0
    for load in loads:
        if load.name in place:
            parts = sum(one.get(load.name, 0) for one in places)
            held += -(-load.window_bytes * place[load.name] // parts)
    return held


def _total(loads: Sequence[SourceLoad]) -> int:
    return sum(load.cost for load in loads)


def _costliest(windows: Sequence[Sequence[SourceLoad]]) -> Sequence[SourceLoad]:
    return max(windows, key=_total)


def _or_none(loads: Sequence[SourceLoad], budget: LoaderBudget, processes: int) -> Partition | None:
    try:
        return partition(loads, budget, processes=processes)
    except OptionError:
        return None


# --- How far a run is, and what it has decided: the notes that scaling follows.
#
# A run writes only where somebody follows it, and one process of it does; a run that resumes from an earlier step
# takes back the notes after it. Cost: a line for each interval, and for each decision of the run.

logger = logging.getLogger(__name__)

PROGRESS_NAME = "progress.jsonl"


class ProgressLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file."""

    step: int
    gone: list[str] = []
    decided: dict[str, int] = {}


_decode = msgspec.json.Decoder(ProgressLine).decode


class ProgressLog:
    """What a run tells of itself."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        """Nothing is written; `folders`: where loaders register."""
        self._paths = [Path(folder) / PROGRESS_NAME for folder in folders]
        self._last: ProgressLine | None = None

    def note(self, step: int, gone: frozenset[str], decided: Mapping[str, int]) -> None:
        """Say that the steps before this one are asked for next; most calls write nothing."""
        line = ProgressLine(step=step, gone=sorted(gone), decided=dict(sorted(decided.items())))
        last, self._last = self._last, line
        is_same = last is not None and (last.gone, last.decided) == (line.gone, line.decided)
        if last is not None and is_same and last.step // EVERY_STEPS == step // EVERY_STEPS:
            return
        for path in self._paths:
            try:
                _append(path, line)
            except OSError as error:
                logger.warning("%s: %s; loaders are not scaled meanwhile", path, error.strerror)


def follow_progress(folder: Path) -> Path:
    """Begin to follow a run: empty the file, so that runs write into it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROGRESS_NAME
    path.write_bytes(b"")
    return path


class RunNotes:
    """The notes of the run that wrote last; each line of the file is read once."""

    def __init__(self, path: Path) -> None:
        """Nothing is read."""
        self._path, self._num_read = path, 0
        self.notes: list[RunNote] = []
        """By rising step."""

    def look(self) -> bool:
        """Read what is new; whether a run begins, or begins again."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._num_read)
                lines = file.read().split(b"\n")[:-1]  # behind the last line end is nothing, or half a line
        except OSError:
            return False
        before = kept = len(self.notes)
        for line in lines:
            self._num_read += len(line) + 1
            try:
                found = _decode(line)
            except msgspec.MsgspecError:
                continue
            while self.notes and self.notes[-1].step >= found.step:
                self.notes.pop()
                kept = min(kept, len(self.notes))
            self.notes.append(RunNote(step=found.step, gone=frozenset(found.gone), decided=found.decided))
        return bool(self.notes) and (not before or kept < before)


def notes_of(path: Path) -> list[RunNote]:
    """The notes of the run that wrote last, by rising step."""
    found = RunNotes(path)
    found.look()
    return found.notes


def _append(path: Path, line: ProgressLine) -> None:
    """Write a line in one call, where the file is there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return
    try:
        os.write(descriptor, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(descriptor)
