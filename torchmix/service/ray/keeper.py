"""The process that keeps a job's loaders on Ray, as the ranks of the job see it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

import msgspec

from torchmix.errors import LoaderLost
from torchmix.parallel.children import Child, text_of_end
from torchmix.parallel.keeper import Keeper
from torchmix.recipe.structs import Autoscale
from torchmix.service.main import LoaderStart, framed, receive
from torchmix.service.ray.main import RayStart, decode_ray_listens
from torchmix.service.roster import FolderMirror, JobStore, Nodes, text_of, value_of

# --- The process that keeps a job's loaders on Ray, as the job's first rank sees it.
#
# A process that is lost is started again, and starts other loaders; it ends with this one.

KEEPER = "torchmix.service.ray.main"
END_S = 60.0
"""How long it may take to end its loaders, before it is killed and Ray ends them."""


class RayProcess:
    """The process, as a keeper keeps it."""

    def __init__(self, told: RayStart) -> None:
        """Start nothing; `told` is the message that the process reads first."""
        self._told = told
        self._child: Child | None = None

    def start(self) -> None:
        """See `Kept`."""
        self._is_ready = False
        self._child = Child(KEEPER, ignored_signals=self._told.loader.ignored_signals)
        self._child.road.sendall(framed(self._told))

    def look(self) -> bool:
        """See `Kept`: it says once how its loaders fare, and its end of the road closes with it."""
        assert self._child is not None, "none was started"
        if not wait([self._child.road], 0):
            return self._is_ready
        try:
            said = decode_ray_listens(receive(self._child.road))
        except (EOFError, OSError) as error:
            how = text_of_end(self._child.kill())
            raise LoaderLost(f"the process {self._child.pid}, which keeps loaders on Ray, has ended {how}") from error
        if said.error is not None:
            raise said.error.error()
        self._is_ready = True
        return True

    def ask_to_end(self) -> None:
        """See `Kept`."""
        if self._child is not None:
            with suppress(OSError):
                self._child.road.shutdown(socket.SHUT_RDWR)

    def end(self, patience_s: float) -> None:
        """See `Kept`."""
        if self._child is not None:
            self._child.end(patience_s)


# --- The loaders of a job on a Ray cluster: kept by the first rank, known on every node.
#
# The first rank of a node has its folder, and the first rank of the job the process that keeps the loaders; all end
# with these ranks; secrets are written nowhere. Cost: the start of actors, once for all parts of a recipe that are
# open together.


class RayMeans(msgspec.Struct, frozen=True, kw_only=True):
    """How many loaders there may be on a cluster; see `RayStart`."""

    address: str
    processes: int | Literal["auto"]
    autoscale: Autoscale | None
    cpu: int | None
    memory_bytes: int | None


class RayLoaders:
    """What a rank holds of them: a folder, the process that keeps them, or nothing."""

    def __init__(self, mirror: FolderMirror | None, keeper: Keeper | None) -> None:
        """Made by `open_ray_loaders`."""
        self.mirror, self.keeper = mirror, keeper

    def close(self) -> None:
        """End them; may be called again."""
        if self.keeper is not None:
            self.keeper.close(END_S)
        if self.mirror is not None:
            self.mirror.close()


def open_ray_loaders(
    start: LoaderStart,
    means: RayMeans,
    nodes: Nodes,
    *,
    store: JobStore,
    own_store: Callable[[], JobStore],
    prefix: str,
    rank: int,
    check: Callable[[], None],
) -> tuple[RayLoaders, Path]:
    """Start the loaders of a job on a cluster. A collective.

    Args:
        start: What they serve.
        means: How many there may be.
        nodes: The nodes of the job; public keys of all ranks.
        store: The job's; None where all ranks are in this process.
        own_store: Makes another connection to it.
        prefix: The prefix of the keys of this round.
        rank: Global rank.
        check: Raises while this waits, if a rank is lost.

    Returns:
        What this rank holds, and the folder where its node finds the loaders.

    Raises:
        TorchmixError: On the first rank: there is no cluster, no profile or no room, or ray is not installed.
        OSError: A process cannot be started.
    """
    first = nodes.first_of_rank[rank] if nodes.first_of_rank else rank
    held = RayLoaders(FolderMirror() if rank == first else None, None)
    roster = f"{prefix}/roster"
    try:
        if held.mirror is not None and rank == 0:
            told = RayStart(
                loader=msgspec.structs.replace(start, allowed=nodes.clients),
                folder=str(held.mirror.folder),
                address=means.address,
                processes=means.processes,
                autoscale=means.autoscale,
                cpu=means.cpu,
                memory_bytes=means.memory_bytes,
            )
            held.keeper = Keeper()
            held.keeper.add([RayProcess(told)], check=check)
            held.keeper.watch("torchmix-ray")
            if store is not None:
                held.mirror.tell(own_store(), roster)
        elif held.mirror is not None:
            held.mirror.follow(own_store(), roster, check)
        if store is None:
            assert held.mirror is not None
            return held, held.mirror.folder
        if held.mirror is not None:
            store.set(f"{prefix}/folder/{rank}", text_of(str(held.mirror.folder)))
        return held, Path(value_of(store, f"{prefix}/folder/{first}", msgspec.json.Decoder(str).decode, check))
    except BaseException:
        held.close()
        raise
