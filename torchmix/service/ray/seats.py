"""Loaders as actors of a Ray cluster.

In: a recipe's path, and where loaders register; both are seen by all nodes. Out: `LoaderSeats`. Must hold: an actor
asks for the processor and the memory that the partition gives its loader, so Ray places it where they are; one that is
killed, or whose node is lost, is started again by Ray, where there is room, and gets the sources that it had; the
registration of the one that was lost goes. Cost: a worker process of Ray beside each loader, some 100 MB.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchmix.errors import LoaderLost, OptionError
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.source.documents import PARTS
from torchmix.service.endpoints import register, registration_path
from torchmix.service.main import LoaderStart
from torchmix.service.pool import LoaderPool

logger = logging.getLogger(__name__)

START_S = 180.0
"""Time in which Ray finds a place for an actor, and its loader listens."""
CALL_S = 30.0
BUSY_CPU = 1
"""Processors of an actor."""


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all loaders on a cluster are told; it travels as JSON."""

    recipe: str
    """Path of the recipe, as every node sees it."""
    register: str
    """The folder that loaders register in, as every node sees it."""
    bind: str = ""
    """Where each listens, with port 0; empty: at the address of its node."""
    keys: str = ""
    """The folder of the loaders' keys, as every node sees it; empty: without."""
    cache_bytes: int
    """Decoded pages that each keeps."""


_decode = msgspec.json.Decoder(RaySettings).decode


class LoaderActor:
    """What Ray runs on a node: one loader process, started again when it ends. Arguments and results are text."""

    def __init__(self, settings: str, sources: str) -> None:
        """Start the loader.

        Args:
            settings: A `RaySettings`, as JSON.
            sources: Parts of sources by name, as JSON.
        """
        import ray

        found = _decode(settings)
        recipe, folder = recipe_and_directory("ray", found.recipe, None)
        address = ray.util.get_node_ip_address()
        start = LoaderStart(
            parts={name: part_of(recipe, name) for name in PARTS if has_part(recipe, name)},
            base=str(folder),
            catalog_folder=str(folder / recipe.catalog),
            cache_bytes=found.cache_bytes,
            bind=found.bind or f"tcp://{address}:0",
            keys=found.keys,
            register=found.register,
            sources=json.loads(sources),
        )
        self._pool = LoaderPool([start])

    def endpoint(self) -> str:
        """Where it listens."""
        return self._pool.endpoints[0]

    def give(self, sources: str) -> None:
        """Change its sources; JSON."""
        self._pool.give(0, json.loads(sources))

    def leave(self) -> None:
        """Take it from the folder."""
        self._pool.leave(0)

    def close(self) -> None:
        """End the loader."""
        self._pool.close()


@dataclass(slots=True, eq=False)
class _Seat:
    actor: Any
    endpoint: str
    sources: dict[str, int] = field(default_factory=dict)
    has_left: bool = False


class RaySeats:
    """Loaders on a cluster, each under a number."""

    def __init__(self, ray: Any, settings: RaySettings) -> None:
        """Nothing is started.

        Args:
            ray: The module, connected.
            settings: What all are told.
        """
        self._ray, self._settings = ray, settings
        self._lock = threading.Lock()
        self._seats: dict[int, _Seat] = {}
        self.num_moved = 0
        """Loaders that Ray has started again."""

    @property
    def endpoints(self) -> list[str]:
        """Where those that run listen, by number."""
        return [self._seats[number].endpoint for number in sorted(self._seats)]

    def start(self, number: int, sources: Mapping[str, int], memory_bytes: int) -> None:
        """See `LoaderSeats`."""
        kind = self._ray.remote(LoaderActor).options(
            num_cpus=BUSY_CPU,
            memory=memory_bytes,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        actor = kind.remote(msgspec.json.encode(self._settings).decode(), json.dumps(dict(sources)))
        try:
            endpoint = self._ray.get(actor.endpoint.remote(), timeout=START_S)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(actor)
            raise LoaderLost(
                f"Ray started no loader within {START_S:.0f} s, with {BUSY_CPU} processor and {memory_bytes} bytes of "
                f"memory: {error}"
            ) from error
        with self._lock:
            self._seats[number] = _Seat(actor, endpoint, dict(sources))

    def give(self, number: int, sources: Mapping[str, int]) -> None:
        """See `LoaderSeats`."""
        seat = self._seats[number]
        seat.sources, seat.has_left = dict(sources), False
        self._tell(seat, seat.actor.give.remote(json.dumps(seat.sources)))

    def leave(self, number: int) -> None:
        """See `LoaderSeats`."""
        seat = self._seats[number]
        seat.has_left = True
        self._tell(seat, seat.actor.leave.remote())
        self._forget(seat.endpoint)

    def stop(self, number: int) -> None:
        """See `LoaderSeats`."""
        seat = self._seats.pop(number)
        self._tell(seat, seat.actor.close.remote())
        self._ray.kill(seat.actor)
        self._forget(seat.endpoint)

    def look(self) -> None:
        """See `LoaderSeats`: follow loaders that Ray has moved."""
        asked = {number: (seat, seat.actor.endpoint.remote()) for number, seat in self._seats.items()}
        if not asked:
            return
        ready, _ = self._ray.wait([call for _, call in asked.values()], num_returns=len(asked), timeout=CALL_S / 10)
        for number, (seat, call) in asked.items():
            try:
                endpoint = self._ray.get(call) if call in ready else None
            except self._ray.exceptions.RayError:  # Ray is starting it again
                endpoint = None
            if endpoint is None:
                self._forget(seat.endpoint)
            elif endpoint != seat.endpoint:
                logger.warning("loader %d at %s was lost; it is at %s now", number, seat.endpoint, endpoint)
                self.num_moved += 1
                self._forget(seat.endpoint)
                seat.endpoint = endpoint
                if seat.has_left:
                    self.leave(number)
                else:
                    self.give(number, seat.sources)
            elif not seat.has_left and not self._path(endpoint).exists():  # it was slow for a while
                register(Path(self._settings.register), endpoint, seat.sources)

    def _tell(self, seat: _Seat, call: Any) -> None:
        try:
            self._ray.get(call, timeout=CALL_S)
        except self._ray.exceptions.RayError as error:
            logger.warning("loader at %s: %s", seat.endpoint, error)

    def _path(self, endpoint: str) -> Path:
        return registration_path(Path(self._settings.register), endpoint)

    def _forget(self, endpoint: str) -> None:
        """Remove a registration whose loader cannot do so itself any more."""
        self._path(endpoint).unlink(missing_ok=True)


def settings_of_ray(
    recipe: Path, *, register: Path, bind: str, keys: Path | None, cache: str | int, most: int
) -> RaySettings:
    """What loaders on a cluster are told.

    Args:
        recipe: The recipe's path.
        register: The folder of registrations.
        bind: Where each listens; empty: at the address of its node, which needs keys.
        keys: The folder of the loaders' keys.
        cache: The recipe's `read.cache`.
        most: Loaders at most, which share the cache evenly.

    Raises:
        OptionError: Loaders are to listen at a fixed port, or at the address of their nodes without keys.
    """
    if bind and not bind.endswith(":0"):
        raise OptionError(f"--bind {bind}: several loaders may be on one node of a Ray cluster; write port 0")
    if not bind and keys is None:
        raise OptionError("loaders on a Ray cluster listen at the addresses of their nodes: pass --keys DIR")
    return RaySettings(
        recipe=str(recipe.absolute()),
        register=str(register.absolute()),
        bind=bind,
        keys="" if keys is None else str(keys.absolute()),
        cache_bytes=parse_bytes(cache, where="read.cache") // most,
    )
