"""An iterator whose items a thread makes ahead of its consumer.

`close()` ends the thread and closes the iterator inside it, so a generator's `finally` runs in the thread that ran its
body; only `close()` discards items. Cost: one lock per item.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """An iterator over `items`, which a thread of its own makes ahead of the consumer.

    An error comes in its place, behind the items before it, whenever it is asked for.
    """

    def __init__(
        self,
        items: Iterator[Item],
        *,
        depth: int,
        name: str,
        on_close: Callable[[], object] = lambda: None,
        size_of: Callable[[Item], int] = lambda _: 1,
    ) -> None:
        """Start the thread.

        Args:
            items: The iterator; only the new thread uses it from now on.
            depth: The next item is made while those beyond the last one taken are of less than this size; 1 or more.
            name: Name of the thread in debuggers.
            on_close: `close` calls this first, to interrupt an iterator that takes long to make an item.
            size_of: The size of an item; by default each is one.
        """
        self._items = items
        self._depth = depth
        self._on_close, self._size_of = on_close, size_of
        self._waiting: deque[Item] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Ahead[Item]:
        return self

    def __next__(self) -> Item:
        return self.take()

    def take(self, timeout_s: float | None = None) -> Item:
        """The next item.

        Raises:
            StopIteration: There are no more items.
            TimeoutError: No item has come within `timeout_s`.
        """
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._waiting or self._ended or self._closed, timeout_s)
            if not arrived:
                raise TimeoutError
            if self._waiting and not self._closed:
                item = self._waiting.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self, timeout_s: float | None = None) -> bool:
        """Discard the waiting items and end the thread; returns whether it has ended within `timeout_s`.

        A fork of the process does nothing: it has no such thread, and the iterator's resources are not the fork's.
        """
        if os.getpid() != self._process:
            return True
        self._on_close()
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is threading.current_thread():  # collected as garbage in its own thread: it ends by itself
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            try:
                while self._has_room():
                    try:
                        item = next(self._items)
                    except StopIteration:
                        break
                    with self._changed:
                        if not self._closed:
                            self._waiting.append(item)
                            self._changed.notify_all()
                    del item  # the consumer's alone, also while the next one is made
            finally:
                close = getattr(self._items, "close", None)
                if close is not None:
                    close()
        except BaseException as raised:  # the edge of a thread: carried to the consumer
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until another item may be made; False when nobody wants one."""
        with self._changed:
            self._changed.wait_for(lambda: sum(map(self._size_of, self._waiting)) < self._depth or self._closed)
            return not self._closed


# --- A flag that another thread sets to end the making of steps, wherever that happens.
#
# What is left here is called once it is set, also if it was set before.


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
