"""An LRU cache with a budget of bytes: the least recently used entry is dropped first.

In: values with a size. Out: the same values, while they are kept. Must hold: the sizes of kept values never sum to more
than the budget; a value larger than the whole budget is never kept. Cost: under a microsecond a call. Not for
several threads at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class PageCache(Generic[Key, Value]):
    """Decoded pages, or companions, by any key."""

    def __init__(self, budget_bytes: int) -> None:
        """Keep at most `budget_bytes`, 0 or more."""
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes kept now."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        """Whether a value is kept; does not count as a use."""
        return key in self._kept

    def use(self, key: Key) -> Value | None:
        """The value, now the most recently used one; None if it is not kept."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more can be kept without dropping anything."""
        return self._num_bytes + num_bytes <= self._budget_bytes

    def keep(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep a value as the most recently used one; drop the least recently used ones to make room."""
        self.forget(key)
        if num_bytes > self._budget_bytes:
            return
        while not self.has_room(num_bytes):
            _, (_, oldest_bytes) = self._kept.popitem(last=False)
            self._num_bytes -= oldest_bytes
        self._kept[key] = (value, num_bytes)
        self._num_bytes += num_bytes

    def forget(self, key: Key) -> None:
        """Drop a value, if it is kept."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._num_bytes -= found[1]

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._num_bytes = 0
