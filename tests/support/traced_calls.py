"""The calls between files of the package, in the order in which they were made, and those that climb."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

from tests.test_fences import PACKAGE, ROOMS

Place = tuple[str, str]
"""File below `torchmix/`, and the qualified name of a function in it."""

CALL_WHAT_THEY_ARE_GIVEN = {
    "parallel/keeper.py": "seats, whose methods it names in `Kept`",
    "parallel/children.py": "where the beats of a process go",
    "boards/board.py": "the figures that a process shows",
}
SEAMS = {
    ("steps/worker/shared_stream.py", "SharedStream._is_over"): "whether anybody waits still",
    ("steps/worker/shared_arrays.py", "SharedArrays.allocate"): "memory of a kind of its own",
    ("stateful/arguments.py", "OtherRanks.check"): "raises in whoever waits, if a rank is lost",
    ("planner/drawing.py", "SharesOfStep.in_group"): "the schedule's shares, for a policy",
    ("steps/decisions.py", "FollowedLog."): "the log of decisions, which a planner reads as a sequence",
}
"""What a room below gives others to call: how the function's name begins, and what it is. All else that climbs is a
fault."""


@dataclass
class Trace:
    """What was called while the trace ran, in all threads that began meanwhile and in the one that asked for it."""

    entered: dict[Place, int] = field(default_factory=dict)
    """When each function was first entered."""
    done: dict[Place, int] = field(default_factory=dict)
    """When each first returned, or yielded something."""
    calls: dict[tuple[Place, Place], int] = field(default_factory=dict)
    """Who called whom, when first; what stands between them outside of the package is left out. A generator is called
    by nobody: whoever asks it for its next item has been given it."""
    times: Counter[Place] = field(default_factory=Counter)
    """How often each function was entered; 1 for generators, which are entered again to go on."""
    now: int = 0

    def restart(self) -> Trace:
        """The calls noted so far, which are forgotten here."""
        before = replace(self)
        self.entered, self.done, self.calls, self.times = {}, {}, {}, Counter()
        return before


def climbs(trace: Trace) -> list[str]:
    """Calls of a room below, where no seam says that it is so."""

    def depth(file: str) -> int:
        room = file.partition("/")[0].removesuffix(".py")
        return ROOMS.index(room) if room in ROOMS else len(ROOMS)

    return [
        f"{caller} {who} -> {file} {what}"
        for (caller, who), (file, what) in trace.calls
        if depth(caller) < depth(file)
        and caller not in CALL_WHAT_THEY_ARE_GIVEN
        and not any(file == of and what.startswith(name) for of, name in SEAMS)
    ]


_places: dict[CodeType, Place | None] = {}


def _place_of(code: CodeType) -> Place | None:
    """None for what is outside of the package, and for what the compiler makes of modules and comprehensions."""
    if code not in _places:
        inside = code.co_filename.startswith(f"{PACKAGE}/") and (
            not code.co_name.startswith("<") or code.co_name == "<lambda>"
        )
        _places[code] = (code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname) if inside else None
    return _places[code]


def _caller(frame: FrameType) -> Place | None:
    """None also for what the collector of garbage calls, in whatever it interrupts."""
    above = None if frame.f_code.co_name == "__del__" else frame.f_back
    while above is not None and above.f_code.co_name != "<module>":  # an import runs nothing for its importer
        place = _place_of(above.f_code)
        if place is not None:
            return place
        above = None if above.f_code.co_filename == weakref.__file__ else above.f_back
    return None


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace what is called inside."""
    trace, lock, is_over = Trace(), threading.Lock(), False

    def profile(frame: FrameType, event: str, result: Any) -> None:
        if is_over or event not in ("call", "return"):
            return
        place = _place_of(frame.f_code)
        if place is None:
            return
        is_generator = bool(frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE))
        with lock:
            trace.now += 1
            if event == "return":
                if not is_generator or result is not None:
                    trace.done.setdefault(place, trace.now)
                return
            trace.entered.setdefault(place, trace.now)
            trace.times[place] = 1 if is_generator else trace.times[place] + 1
            if not is_generator and (caller := _caller(frame)) is not None:
                trace.calls.setdefault((caller, place), trace.now)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield trace
    finally:
        with lock:
            is_over = True  # threads that go on keep the function
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
