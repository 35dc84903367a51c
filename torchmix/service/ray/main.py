"""What runs in the process that keeps the loaders of a job on a Ray cluster.

It ends the loaders when the rank does, however it ends; where this process is killed itself, Ray ends them, since they
are actors of its connection. Cost: a process of some 150 MB beside the rank, which thus has none of Ray's threads and
handlers.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from torchmix.errors import TorchmixError
from torchmix.parallel.children import run_process
from torchmix.parallel.wire import ErrorForm
from torchmix.recipe.structs import Autoscale
from torchmix.service.endpoints import Registry
from torchmix.service.main import LoaderStart, framed, receive
from torchmix.service.ray.seats import RaySeats, connected
from torchmix.service.scale.loads import bounds_of, budget_of_cluster, coming_loads
from torchmix.service.scale.scaling import ScaledLoaders

logger = logging.getLogger(__name__)

FOLLOW_S = 0.5


class RayStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told."""

    loader: LoaderStart
    """What all loaders are told."""
    address: str
    """The cluster."""
    folder: str
    """Where the loaders are registered, and the run writes its progress; of this machine."""
    processes: int | Literal["auto"] = 1
    autoscale: Autoscale | None = None
    cpu: int | None = None
    """Processors of all loaders; None: the cluster's."""
    memory_bytes: int | None = None
    """Memory of all loaders; None: the cluster's."""


class RayListens(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers."""

    error: ErrorForm | None = None


_decode_start = msgspec.msgpack.Decoder(RayStart).decode
decode_ray_listens = msgspec.msgpack.Decoder(RayListens).decode


def main(descriptor: int, ignored: Collection[int], cpu: int) -> NoReturn:
    """See `run_process`; `cpu` is the cluster's to bound."""
    run_process(partial(keep_loaders, ignored=ignored), descriptor, ignored)


def keep_loaders(end: socket.socket, ignored: Collection[int] = ()) -> int:
    """Keep the loaders until the other end goes; the exit code."""
    try:
        start = _decode_start(receive(end))
    except EOFError:
        return 0
    try:
        loaders = _open(start, ignored)
    except (TorchmixError, OSError) as error:
        with suppress(OSError):
            end.sendall(framed(RayListens(error=ErrorForm.of(error))))
        return 1
    try:
        with suppress(OSError):
            end.sendall(framed(RayListens()))
        while not wait([end], FOLLOW_S):
            try:
                loaders.look()
            except Exception:  # the cluster's: a loader that runs continues without this process
                logger.exception("loaders on Ray are not followed at this moment")
                time.sleep(FOLLOW_S)
    finally:
        loaders.close()
    return 0


def _open(start: RayStart, ignored: Collection[int]) -> ScaledLoaders:
    folder = Path(start.folder)
    registry = Registry(folder)  # first: what a process that was killed has left goes
    is_counted = start.autoscale is None and start.processes != "auto"
    part = start.loader.parts["train"]
    coming = coming_loads(part, start.loader.fetched_catalog(), is_profile_needed=not is_counted)
    ray = connected(start.address)
    # Ray has put a handler of its own there.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if signal.SIGTERM in ignored else signal.SIG_DFL)
    budget = budget_of_cluster(start.cpu, start.memory_bytes, ray.cluster_resources())
    bounds = bounds_of(start.processes, start.autoscale, coming, budget)
    seats = RaySeats(ray, start.loader, registry)
    return ScaledLoaders(
        seats,
        lambda begin, stop, note: coming.mean(begin, stop, note.gone, note.decided),
        bounds,
        folder,
        clock=time.monotonic,
    )
