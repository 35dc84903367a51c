"""One keeper of what works for a process: seats are started, watched, started again later each time, and ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec

from torchmix.errors import TorchmixError
from torchmix.parallel.children import END_S, LOOK_S

# --- What becomes of one seat: the table of states, without processes, threads or clocks.
#
#     state      what happens              what follows
#     due        it starts                 starting
#     due        it cannot be started      due, later
#     starting   it is ready               running
#     starting   it is lost                due, later
#     running    it is lost                due: at once after `steady_s` of running, else later
#     any        it is lost once too often over
#
# Each wait is twice the one before, up to `most_s`; what has run for `steady_s` begins again with none. Cost: nothing.


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """When what was lost is started again."""

    first_s: float = 0.5
    """The wait after a loss; 0: there is none."""
    most_s: float = 30.0
    steady_s: float = 60.0
    """What has run for so long is started again at once."""
    most_losses: int = 0
    """So many within `steady_s` are too many; 0: any number is borne."""


State = Literal["due", "starting", "running", "over"]


class Upkeep:
    """One seat's place in the table; all times are of one clock."""

    def __init__(self, again: Again) -> None:
        """A seat that is due at once."""
        self._again = again
        self._wait_s = again.first_s
        self._running_since_s = 0.0
        self._losses_s: deque[float] = deque(maxlen=max(1, again.most_losses))
        self.state: State = "due"
        self.due_s = float("-inf")
        """When it is to be started, where it is due."""

    @property
    def losses_within_s(self) -> float:
        """From the first to the last of the losses that are counted."""
        return self._losses_s[-1] - self._losses_s[0] if self._losses_s else 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether it is to be started now."""
        return self.state == "due" and now_s >= self.due_s

    def has_started(self) -> None:
        """It is on its way."""
        self.state = "starting"

    def is_ready(self, now_s: float) -> None:
        """It works."""
        if self.state == "starting":
            self.state, self._running_since_s = "running", now_s

    def is_lost(self, now_s: float) -> None:
        """It is gone, or could not be started."""
        is_steady = self.state == "running" and now_s - self._running_since_s >= self._again.steady_s
        self._losses_s.append(now_s)
        if len(self._losses_s) == self._again.most_losses and self.losses_within_s < self._again.steady_s:
            self.state = "over"
            return
        self.state, self.due_s = "due", now_s
        if is_steady:
            self._wait_s = self._again.first_s
        else:
            self.due_s += self._wait_s
            self._wait_s = min(2 * self._wait_s, self._again.most_s)


# --- The keeper: what becomes of seats, done.
#
# A seat is a loader, the worker of a node, an actor: the keeper knows four things that it can do, and not what it is.
# Cost: a look at each seat four times a second.

logger = logging.getLogger(__name__)

START_LOOK_S = 0.02
"""Between two looks at what somebody waits for."""
FAILURES = (OSError, TorchmixError, msgspec.MsgspecError)
"""What a seat may raise; anything else is a mistake of this package."""


class Kept(Protocol):
    """A seat: a place at which something is to run."""

    def start(self) -> None:
        """Start it, without waiting for it.

        Raises:
            OSError, TorchmixError: It cannot be started.
        """

    def look(self) -> bool:
        """Hear what it says; whether it is ready for its work.

        Raises:
            TorchmixError: It is lost, as the error says.
        """

    def ask_to_end(self) -> None:
        """Tell it to end, and do not wait."""

    def end(self, patience_s: float) -> None:
        """End it within seconds, by force after `patience_s`, and remove what it leaves; also where nothing runs."""


Kind = Literal["lost", "again", "unstarted", "over"]
"""What a keeper tells of a seat: it is lost; it was started again; that failed; it is given up."""
Tell = Callable[[Kind, Exception | None, Upkeep], None]
"""The error is None for `again`."""


def warn(kind: Kind, error: Exception | None, upkeep: Upkeep) -> None:
    """Log what was lost."""
    if error is not None:
        logger.warning("%s%s", "cannot be started again: " if kind == "unstarted" else "", error)


class Keeper:
    """Keeps seats. One thread looks; any may add and remove seats."""

    def __init__(
        self, again: Again | None = None, *, tell: Tell = warn, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep nothing yet.

        Args:
            again: When what was lost is started again.
            tell: Called with what becomes of a seat, in the thread that looks.
            clock: Seconds, of any zero.
        """
        self._again, self._tell, self._clock = again or Again(), tell, clock
        self._kept: dict[Kept, Upkeep] = {}
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_lost = 0
        """What ran and was lost."""

    def add(self, seats: Iterable[Kept], *, check: Callable[[], None] = lambda: None) -> None:
        """Start seats, wait until all are ready, and keep them.

        Args:
            seats: They are ended if one of them fails.
            check: Raises while this waits, if nobody wants them any more.

        Raises:
            OSError, TorchmixError: One cannot be started, or is lost before it is ready.
        """
        new = {seat: Upkeep(self._again) for seat in seats}
        try:
            for seat, upkeep in new.items():
                seat.start()
                upkeep.has_started()
            while True:
                for seat, upkeep in new.items():
                    if seat.look():
                        upkeep.is_ready(self._clock())
                if all(upkeep.state == "running" for upkeep in new.values()):
                    break
                check()
                time.sleep(START_LOOK_S)
        except BaseException:
            _end_all(new, END_S)
            raise
        with self._lock:
            self._kept.update(new)

    def remove(self, seat: Kept, patience_s: float = END_S) -> None:
        """Keep a seat no more, and end it."""
        with self._lock:
            self._kept.pop(seat, None)
        _end_all([seat], patience_s)

    def watch(self, name: str) -> None:
        """Look again and again, in a thread of this name, until `close`."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look at each seat once, and do what is to be done."""
        with self._lock:
            for seat, upkeep in self._kept.items():
                if upkeep.state in ("starting", "running"):
                    self._look_at(seat, upkeep)
                if upkeep.is_due(self._clock()):
                    self._start(seat, upkeep)

    def close(self, patience_s: float = END_S) -> None:
        """End all seats; may be called again.

        Args:
            patience_s: How long each may take to end by itself.
        """
        self._is_ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            seats = list(self._kept)
            self._kept.clear()
        _end_all(seats, patience_s)

    def _run(self) -> None:
        while not self._is_ending.wait(LOOK_S):
            self.look()

    def _look_at(self, seat: Kept, upkeep: Upkeep) -> None:
        try:
            if seat.look():
                upkeep.is_ready(self._clock())
        except FAILURES as error:
            self.num_lost += 1
            self._lose(seat, upkeep, "lost", error)

    def _start(self, seat: Kept, upkeep: Upkeep) -> None:
        try:
            seat.start()
        except FAILURES as error:
            self._lose(seat, upkeep, "unstarted", error)
        else:
            upkeep.has_started()
            self._tell("again", None, upkeep)

    def _lose(self, seat: Kept, upkeep: Upkeep, kind: Kind, error: Exception) -> None:
        seat.end(0.0)
        upkeep.is_lost(self._clock())
        self._tell("over" if upkeep.state == "over" else kind, error, upkeep)


def _end_all(seats: Iterable[Kept], patience_s: float) -> None:
    for seat in (seats := list(seats)):
        seat.ask_to_end()
    for seat in seats:
        seat.end(patience_s)
