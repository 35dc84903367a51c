"""The beats of a process for whoever started it, and for `judge.py` there.

In: whether something is asked of this process; what it has done for that, and its looks at what it waits for. Out: a
beat once a second. Must hold: time that the beats themselves take is no progress; neither does a busy machine make a
process seem idle. Cost: two clocks a second, and a small file of /proc for each thread that does nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from torchmix.parallel.children.judge import ProcessBeat

BEAT_S = 1.0
GRAIN_NS = 20_000_000
"""Time of processors that counts as progress: clocks read one after the other differ by less."""


class OwnPulse:
    """Beats of this process; used by the one thread that sends them."""

    def __init__(self, beat: Callable[[ProcessBeat], None], *, waits: Callable[[int], bool] | None = None) -> None:
        """`beat` sends one; `waits` stands in for `waits_for_processor` in tests."""
        self._beat, self.due_s = beat, 0.0
        """When the next one is due, by this process' monotonic clock."""
        self._waits = waits_for_processor if waits is None else waits
        self._count = self._progress = self._used_ns = self._num_signs = 0

    def look(self, *, is_asked: bool, num_signs: int = 0, threads: Collection[int] = ()) -> None:
        """Send a beat if one is due.

        Args:
            is_asked: Whether something that was asked of this process is not done yet.
            num_signs: Steps made and requests done so far, and looks at what this process waits for: a loader, a
                decision.
            threads: The kernel's numbers of the threads that do what is asked.
        """
        if time.monotonic() < self.due_s:
            return
        self.due_s = time.monotonic() + BEAT_S
        self._count += 1
        used_ns = time.process_time_ns() - time.thread_time_ns()
        has_worked = used_ns - self._used_ns >= GRAIN_NS
        if has_worked or used_ns < self._used_ns:
            self._used_ns = used_ns
        if has_worked or num_signs != self._num_signs or (is_asked and any(map(self._waits, threads))):
            self._progress += 1
        self._num_signs = num_signs
        self._beat(ProcessBeat(count=self._count, is_asked=is_asked, progress=self._progress))


def waits_for_processor(thread: int) -> bool:
    """Whether a thread of this process runs or would run if a processor were free; False where the kernel hides it."""
    try:
        text = Path(f"/proc/self/task/{thread}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] == "R"
