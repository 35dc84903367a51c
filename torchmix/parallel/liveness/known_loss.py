"""The loss that this process knows of: the first one, said at once and kept.

In: losses, from any thread. Out: the first. Must hold: it is on stderr before anybody acts on it, since the process may
end at any moment after. Cost: one line.
"""

from __future__ import annotations

import contextlib
import os
import threading

from torchmix.parallel.liveness.records import Loss


class KnownLoss:
    """One of a process."""

    def __init__(self, rank: int) -> None:
        """`rank` is that of this process."""
        self._rank = rank
        self._lock = threading.Lock()
        self._is_known = threading.Event()
        self.loss: Loss | None = None
        """None while no rank is known to be lost."""

    def declare(self, loss: Loss) -> None:
        """Note that a rank is lost, if none was before."""
        with self._lock:
            if self.loss is not None:
                return
            self.loss = loss
        who = f"rank {loss.rank}" if loss.rank >= 0 else "the launcher"
        with contextlib.suppress(OSError):
            # Not sys.stderr: a stuck main thread may hold its lock.
            os.write(2, f"torchmix: {who} lost: {loss.text} [seen by rank {self._rank}]\n".encode())
        self._is_known.set()

    def wait(self, timeout_s: float) -> None:
        """Until there is one."""
        self._is_known.wait(timeout_s)
