"""The beats of a process for whoever started it, and for `judge.py` there.

In: whether something is asked of this process; looks at what it waits for. Out: a beat once a second. Must hold: time
that the beats themselves take is no progress. Cost: two clocks a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torchmix.parallel.children.judge import ProcessBeat

BEAT_S = 1.0
GRAIN_NS = 20_000_000
"""Time of processors that counts as progress: clocks read one after the other differ by less."""


class OwnPulse:
    """Beats of this process; used by the one thread that sends them."""

    def __init__(self, beat: Callable[[ProcessBeat], None]) -> None:
        """`beat` sends one."""
        self._beat, self.due_s = beat, 0.0
        """When the next one is due, by this process' monotonic clock."""
        self._count = self._progress = 0

    def look(self, *, is_asked: bool, num_looks: int = 0) -> None:
        """Send a beat if one is due.

        Args:
            is_asked: Whether something that was asked of this process is not done yet.
            num_looks: Looks so far at what this process waits for: a loader, a decision.
        """
        if time.monotonic() < self.due_s:
            return
        self.due_s = time.monotonic() + BEAT_S
        self._count += 1
        taken_ns = time.process_time_ns() - time.thread_time_ns()
        self._progress = max(self._progress, taken_ns // GRAIN_NS)
        self._beat(ProcessBeat(count=self._count, is_asked=is_asked, progress=self._progress + num_looks))
