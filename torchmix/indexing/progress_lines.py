"""The progress of an index run as lines, for logs and where nobody watches.

In: calls with bytes done, as `scan_files.Progress`. Out: a line at the start, every minute and at the end, with rate
and time left. Must hold: a run that takes less than a minute says nothing if `only_long` is set. Cost: one read of
the clock for each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torchmix.recipe.byte_sizes import bytes_text

INTERVAL_S = 60.0


class ProgressLines:
    """A `Progress` that says lines; calls come from several threads, but one at a time."""

    def __init__(
        self, say: Callable[[str], None], *, only_long: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Say nothing yet.

        Args:
            say: Takes a line, without its end.
            only_long: Say nothing within the first minute, and of the end only if something was said before.
            clock: Seconds, from anywhere.
        """
        self._say, self._only_long, self._clock = say, only_long, clock
        self._began_s: float | None = None
        self._said_s = 0.0
        self._said_bytes = self._done_bytes = self._all_bytes = 0
        self._has_said = False

    def __call__(self, done_bytes: int, all_bytes: int, source: str, file: str) -> None:
        """Bytes done and in all, of all files to scan, and what is at hand."""
        now_s = self._clock()
        self._done_bytes, self._all_bytes = done_bytes, all_bytes
        if self._began_s is None:
            self._began_s = self._said_s = now_s
            self._said_bytes = done_bytes
            if not self._only_long:
                self._tell(f"indexing {bytes_text(all_bytes)}")
        elif now_s - self._said_s >= INTERVAL_S:
            rate = (done_bytes - self._said_bytes) / (now_s - self._said_s)
            left = f"{duration_text((all_bytes - done_bytes) / rate)} left" if rate > 0 else "no byte since"
            share = 100 * done_bytes // max(1, all_bytes)
            done = f"{bytes_text(done_bytes)} of {bytes_text(all_bytes)} ({share} %)"
            self._tell(f"indexing: {done}, {bytes_text(rate)}/s, {left}; now {source}: {file}")
            self._said_s, self._said_bytes = now_s, done_bytes

    def end(self) -> None:
        """The run has scanned all."""
        if self._began_s is None or (self._only_long and not self._has_said):
            return
        took_s = self._clock() - self._began_s
        rate = bytes_text(self._done_bytes / max(took_s, 1e-9))
        self._tell(f"scanned {bytes_text(self._done_bytes)} in {duration_text(took_s)}, {rate}/s")

    def _tell(self, line: str) -> None:
        self._has_said = True
        self._say(line)


def duration_text(seconds: float) -> str:
    """0:01:05, in hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
