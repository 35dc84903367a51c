"""How much of the reading of a node its own processors take, before loaders are asked: all of it, until they are busy.

In: the processors that the node may use. Out: a share in [0, 1]. Must hold: it is 1 at first, and never moves by more
than a step in a second, so that most pages are read where they were read before. Cost: two clocks.

The share goes down by a step where the process has used nine tenths of its processors over the last second or longer,
planning and building included, and up by a step where it has used less than seven. A process that waits for training
uses little, so it reads all that it has time for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 1.0
"""Between two looks at the clocks."""
SPENT = 0.9
"""With this part of the processors in use, loaders are asked for more."""
FREE = 0.7
STEP = 1 / 16


class CpuShare:
    """The share of one process."""

    def __init__(
        self,
        cpu: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Begin with all of the reading.

        Args:
            cpu: Processors that the process may use, 1 or more.
            clock: Seconds, of any zero.
            cpu_clock: Processor seconds that this process has used.
        """
        self._cpu, self._clock, self._cpu_clock = cpu, clock, cpu_clock
        self._looked_s, self._used_s = clock(), cpu_clock()
        self.share = 1.0
        """Part of all pages that this process reads."""

    def look(self) -> float:
        """The share from now on."""
        now, used = self._clock(), self._cpu_clock()
        if now - self._looked_s >= LOOK_S:
            busy = (used - self._used_s) / (self._cpu * (now - self._looked_s))
            self._looked_s, self._used_s = now, used
            if busy >= SPENT:
                self.share = max(0.0, self.share - STEP)
            elif busy < FREE:
                self.share = min(1.0, self.share + STEP)
        return self.share
