"""Loaders of this machine, each of which can be started and ended alone.

In: what a loader is told. Out: `LoaderSeats`. Must hold: as `LoaderPool`. Cost: a process for each.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec

from torchmix.service.endpoints import with_port
from torchmix.service.main import LoaderStart
from torchmix.service.pool import LoaderPool


class LocalSeats:
    """A pool of one loader for each number."""

    def __init__(self, start: LoaderStart) -> None:
        """Nothing is started.

        Args:
            start: What all are told; their ports count up from its own, and they share its cache.
        """
        self._start = start
        self._lock = threading.Lock()
        self._pools: dict[int, LoaderPool] = {}

    @property
    def endpoints(self) -> list[str]:
        """Where those that run listen, by number."""
        return [self._pools[number].endpoints[0] for number in sorted(self._pools)]

    def start(self, number: int, sources: Mapping[str, int], memory_bytes: int, cache_part: int) -> None:
        """See `LoaderSeats`."""
        port = self._start.metrics_port
        start = msgspec.structs.replace(
            self._start,
            bind=with_port(self._start.bind, number),
            metrics_port=port + number if port else 0,
            sources=dict(sources),
            cache_bytes=self._start.cache_bytes * cache_part >> 32,
        )
        pool = LoaderPool([start])
        with self._lock:
            self._pools[number] = pool

    def give(self, number: int, sources: Mapping[str, int]) -> None:
        """See `LoaderSeats`."""
        self._pools[number].give(0, dict(sources))

    def leave(self, number: int) -> None:
        """See `LoaderSeats`."""
        self._pools[number].leave(0)

    def stop(self, number: int) -> None:
        """See `LoaderSeats`."""
        self._pools.pop(number).close()

    def look(self) -> None:
        """Nothing: each pool has a thread that looks."""
