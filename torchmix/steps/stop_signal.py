"""A flag that another thread sets to end the making of steps, wherever that happens.

In: whoever closes a loader sets it. Out: a thread that makes steps looks at it; one that waits for another process is
woken by what it has left here. Must hold: what is left here is called once it is set, also if it was set before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class StopSignal:
    """Set once, by any thread, a collector's too; never unset."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._then: list[Callable[[], object]] = []

    def set(self) -> None:
        """Stop. May be called again."""
        self._event.set()
        for call in list(self._then):
            call()

    def is_set(self) -> bool:
        """Whether to stop."""
        return self._event.is_set()

    def then(self, call: Callable[[], object]) -> None:
        """Have something called with `set`, by the thread that sets it; it may be called more than once."""
        self._then.append(call)
        if self._event.is_set():
            call()
