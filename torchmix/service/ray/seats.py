"""Loaders as actors of a Ray cluster."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from torchmix.errors import LoaderLost, OptionError, TorchmixError
from torchmix.parallel.wire import ErrorForm
from torchmix.service.endpoints import Registry
from torchmix.service.main import LoaderStart
from torchmix.service.pool import LoaderPool
from torchmix.service.roster import ADDRESS_VARIABLE, bind_of
from torchmix.service.server import new_pair

# --- The Ray cluster that a command or a run uses.
#
# What travels as an argument is text and numbers. Ray itself sends classes and functions with cloudpickle; those of
# this package are sent by their names, so each node of the cluster needs the same torchmix installed, and whoever may
# connect to the cluster may run anything there. Cost: seconds to connect.

ANSWER_S = 10.0
TRIES_VARIABLE = "RAY_NUM_REDIS_GET_RETRIES"
"""How often Ray asks for a cluster, 40 s each time; it reads this as it is imported. By default it asks 20 times."""
_HOST_PORT = re.compile(r"[\w.-]+:\d+")


def connected(address: str) -> Any:
    """The module `ray`, connected to a cluster.

    Args:
        address: As `ray.init` takes it: `auto` for the cluster of this machine or of RAY_ADDRESS, or `HOST:PORT`.

    Raises:
        OptionError: ray is not installed, or there is no cluster.
    """
    os.environ.setdefault(TRIES_VARIABLE, "1")
    try:
        import ray
    except ImportError as error:
        raise OptionError("loaders on Ray need the package ray: pip install ray") from error
    if not ray.is_initialized():
        try:
            if _HOST_PORT.fullmatch(address):  # a port at which nobody listens is known at once
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
            ray.init(address=address, log_to_driver=False, logging_level="WARNING", namespace="torchmix")
        except (OSError, ValueError, RuntimeError) as error:
            raise OptionError(f"there is no Ray cluster at {address!r}: {error}; run ray start first") from error
    return ray


# --- What Ray runs on a node: one loader process, watched by the actor that has started it.
#
# What travels is text; where each loader has keys of its own, its secret is made on its node and stays there; the
# loader ends with the actor. Cost: a worker process of Ray beside each loader, some 100 MB.


class ActorListens(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of its loader."""

    endpoint: str = ""
    public: str = ""
    """Its public key; empty where the keys lie in a folder, or there are none."""
    error: ErrorForm | None = None
    """Why there is no loader."""


_decode_start = msgspec.json.Decoder(LoaderStart).decode
decode_listens = msgspec.json.Decoder(ActorListens).decode


class LoaderActor:
    """One loader process, started again when it ends. Arguments and results are text."""

    def __init__(self, start: str) -> None:
        """Start the loader.

        Args:
            start: A `LoaderStart`, as JSON. Without `bind` it listens at the address of this node. With `allowed`, and
                without keys, it makes a pair of its own.
        """
        import ray

        told = _decode_start(start)
        address = os.environ.get(ADDRESS_VARIABLE) or ray.util.get_node_ip_address()
        pair = new_pair() if told.allowed and not told.keys else None
        self._public = "" if pair is None else pair.public
        self._error: ErrorForm | None = None
        try:
            bind = told.bind or bind_of(address)
            self._pool = LoaderPool([msgspec.structs.replace(told, bind=bind, own=pair)])
        except (TorchmixError, OSError) as error:
            # Ray's error for an actor whose constructor raises is a page of its own frames. An actor that Ray starts
            # again has nobody who waits for that error.
            if ray.get_runtime_context().was_current_actor_reconstructed:
                raise
            self._error = ErrorForm.of(error)

    def listens(self) -> str:
        """An `ActorListens`, as JSON."""
        if self._error is not None:
            return msgspec.json.encode(ActorListens(error=self._error)).decode()
        return msgspec.json.encode(ActorListens(endpoint=self._pool.endpoints[0], public=self._public)).decode()

    def is_asked(self) -> bool:
        """Whether the loader owes somebody something."""
        return self._pool.is_asked

    def close(self) -> None:
        """End the loader."""
        self._pool.close()


# --- Loaders as actors of a Ray cluster.
#
# An actor asks for the processor and the memory that the partition gives its loader, so Ray places it where they are;
# one that is killed, or whose node is lost, is started again by Ray, where there is room, and is registered with the
# sources that it had; the registration of the one that was lost goes. Loaders do not register themselves: Ray may start
# an actor and lose it again before anybody has asked it where it listens. Cost: a call of each actor, twice a second.

logger = logging.getLogger(__name__)

START_S = 180.0
"""Time in which Ray finds a place for an actor, and its loader listens."""
CALL_S = 30.0
BUSY_CPU = 1
"""Processors of an actor."""


class _Seat(msgspec.Struct, eq=False):
    actor: Any
    listens: ActorListens
    sources: dict[str, int] = msgspec.field(default_factory=dict)
    has_left: bool = False


class RaySeats:
    """Loaders on a cluster, each under a number."""

    def __init__(self, ray: Any, start: LoaderStart, registry: Registry) -> None:
        """Nothing is started.

        Args:
            ray: The module, connected.
            start: What all are told, as `LoaderActor` takes it; they share its cache.
            registry: Where they are registered.
        """
        self._ray, self._registry = ray, registry
        self._start = msgspec.structs.replace(start, cpu=BUSY_CPU)
        self._lock = threading.Lock()
        self._seats: dict[int, _Seat] = {}

    @property
    def endpoints(self) -> list[str]:
        """Where those that run listen, by number."""
        return [self._seats[number].listens.endpoint for number in sorted(self._seats)]

    def start(self, number: int, sources: Mapping[str, int], memory_bytes: int, cache_part: int) -> None:
        """See `LoaderSeats`."""
        kind = self._ray.remote(LoaderActor).options(
            num_cpus=BUSY_CPU,
            memory=memory_bytes,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        told = msgspec.structs.replace(self._start, cache_bytes=self._start.cache_bytes * cache_part >> 32)
        actor = kind.remote(msgspec.json.encode(told).decode())
        try:
            listens = decode_listens(self._ray.get(actor.listens.remote(), timeout=START_S))
        except self._ray.exceptions.RayError as error:
            self._ray.kill(actor)
            raise LoaderLost(
                f"Ray started no loader within {START_S:.0f} s, with {BUSY_CPU} processor and {memory_bytes} bytes of "
                f"memory: {error}"
            ) from error
        if listens.error is not None:
            self._ray.kill(actor)
            raise listens.error.error()
        with self._lock:
            self._seats[number] = seat = _Seat(actor, listens, dict(sources))
        self._register(seat)

    def give(self, number: int, sources: Mapping[str, int]) -> None:
        """See `LoaderSeats`."""
        seat = self._seats[number]
        seat.sources, seat.has_left = dict(sources), False
        self._register(seat)

    def leave(self, number: int) -> None:
        """See `LoaderSeats`."""
        seat = self._seats[number]
        seat.has_left = True
        self._forget(seat)

    def is_asked(self, number: int) -> bool:
        """See `LoaderSeats`."""
        try:
            return bool(self._ray.get(self._seats[number].actor.is_asked.remote(), timeout=CALL_S / 10))
        except self._ray.exceptions.RayError:  # it is being started again, and owes nothing
            return False

    def stop(self, number: int) -> None:
        """See `LoaderSeats`."""
        seat = self._seats.pop(number)
        self._forget(seat)
        try:
            self._ray.get(seat.actor.close.remote(), timeout=CALL_S)
        except self._ray.exceptions.RayError as error:
            logger.warning("loader at %s: %s", seat.listens.endpoint, error)
        self._ray.kill(seat.actor)

    def look(self) -> None:
        """See `LoaderSeats`: follow loaders that Ray has moved."""
        asked = {number: (seat, seat.actor.listens.remote()) for number, seat in self._seats.items()}
        if not asked:
            return
        ready, _ = self._ray.wait([call for _, call in asked.values()], num_returns=len(asked), timeout=CALL_S / 10)
        for number, (seat, call) in asked.items():
            try:
                listens = decode_listens(self._ray.get(call)) if call in ready else None
            except self._ray.exceptions.RayError:  # Ray is starting it again
                listens = None
            if listens is None:
                self._forget(seat)
            elif listens != seat.listens:
                text = "loader %d at %s was lost; it is at %s now"
                logger.warning(text, number, seat.listens.endpoint, listens.endpoint)
                self._forget(seat)
                seat.listens = listens
            if listens is not None and not seat.has_left and listens.endpoint not in self._registry.endpoints:
                self._register(seat)  # it has moved, or was slow for a while
        self._registry.look()

    def _register(self, seat: _Seat) -> None:
        self._registry.put(seat.listens.endpoint, seat.sources, seat.listens.public)

    def _forget(self, seat: _Seat) -> None:
        self._registry.remove(seat.listens.endpoint)


def check_bind(bind: str, *, has_keys: bool) -> None:
    """Refuse an address at which loaders of a cluster cannot listen.

    Args:
        bind: Where each listens; empty: at the address of its node.
        has_keys: Whether there are keys.

    Raises:
        OptionError: It is a fixed port; or there are no keys.
    """
    if bind and not bind.endswith(":0"):
        raise OptionError(f"--bind {bind}: several loaders may be on one node of a Ray cluster; write port 0")
    if not has_keys:
        raise OptionError("loaders on a Ray cluster listen over TCP: pass --keys DIR, which torchmix keys makes")
