"""LRU caches with one budget of bytes: the least recently used entry of all of them is dropped first.

In: values with a size. Out: the same values, while they are kept. Must hold: the sizes of kept values of the caches of
a room never sum to more than its budget, which is the largest that one of them asks for; a value larger than it is
never kept. Cost: under a microsecond a call. A cache is for one thread at a time, and each cache of a room may be for
another: what one drops to make room, another finds gone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from itertools import count
from math import inf
from typing import Any, Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class CacheRoom:
    """What several caches share; by default a cache has one of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a collector may close another cache of the room meanwhile
        """Held to use, to keep and to drop."""
        self.clock = count()
        """The order of uses."""
        self.num_bytes = 0
        """Bytes kept now, by all."""
        self.budget_bytes = 0
        self._budgets: dict[PageCache[Any, Any], int] = {}

    def enter(self, cache: PageCache[Any, Any], budget_bytes: int) -> None:
        """A cache more."""
        with self.lock:
            self._budgets[cache] = budget_bytes
            self.budget_bytes = max(self._budgets.values())

    def leave(self, cache: PageCache[Any, Any]) -> None:
        """A cache less, which holds nothing any more."""
        with self.lock:
            self._budgets.pop(cache, None)
            self.budget_bytes = max(self._budgets.values(), default=0)
            self.make_room(0)

    def make_room(self, num_bytes: int) -> None:
        """Drop what was used longest ago until so many more can be kept; under the lock."""
        while self.num_bytes + num_bytes > self.budget_bytes:
            min(self._budgets, key=PageCache.oldest_use).drop_oldest()


class _Entry(msgspec.Struct, Generic[Value]):
    value: Value
    num_bytes: int
    used: int
    """By the clock of the room."""


class PageCache(Generic[Key, Value]):
    """Decoded pages, or companions, by any key."""

    def __init__(self, budget_bytes: int, *, room: CacheRoom | None = None) -> None:
        """Keep at most `budget_bytes`, 0 or more; with the other caches of a room, at most what the largest may."""
        self._room = CacheRoom() if room is None else room
        self._kept: OrderedDict[Key, _Entry[Value]] = OrderedDict()
        self._num_bytes = 0
        self._room.enter(self, budget_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes kept here now."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        """Whether a value is kept; does not count as a use."""
        return key in self._kept

    def use(self, key: Key) -> Value | None:
        """The value, now the most recently used one; None if it is not kept."""
        with self._room.lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            found.used = next(self._room.clock)
            return found.value

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more can be kept without dropping anything."""
        return self._room.num_bytes + num_bytes <= self._room.budget_bytes

    def keep(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep a value as the most recently used one; drop the least recently used ones to make room."""
        room = self._room
        with room.lock:
            self._drop(key)
            if num_bytes > room.budget_bytes:
                return
            room.make_room(num_bytes)
            self._kept[key] = _Entry(value, num_bytes, next(room.clock))
            self._count(num_bytes)

    def forget(self, key: Key) -> None:
        """Drop a value, if it is kept."""
        with self._room.lock:
            self._drop(key)

    def clear(self) -> None:
        """Drop everything."""
        with self._room.lock:
            self._kept.clear()
            self._count(-self._num_bytes)

    def close(self) -> None:
        """Drop everything and leave the room; nothing is kept from now on."""
        self.clear()
        self._room.leave(self)

    def oldest_use(self) -> float:
        """When the entry was used that was used longest ago; under the lock of the room."""
        return next(iter(self._kept.values())).used if self._kept else inf

    def drop_oldest(self) -> None:
        """Drop that entry; under the lock of the room."""
        _, oldest = self._kept.popitem(last=False)
        self._count(-oldest.num_bytes)

    def _drop(self, key: Key) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._count(-found.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._room.num_bytes += num_bytes
