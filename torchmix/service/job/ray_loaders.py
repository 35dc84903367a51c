"""The loaders of a job on a Ray cluster: kept by the first rank, known on every node.

In: what they serve, how many there may be, and the nodes of the job. Out: on each node a folder where its clients find
the loaders, which follows them as they come and go. Must hold: the first rank of a node has its folder, and the first
rank of the job the process that keeps the loaders; all end with these ranks; secrets are written nowhere. Cost: the
start of actors, once for all parts of a recipe that are open together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from torchmix.recipe.loader_structs import Autoscale
from torchmix.service.job.mirror import FolderMirror
from torchmix.service.job.roster import JobStore, Nodes, text_of, value_of
from torchmix.service.main import LoaderStart
from torchmix.service.ray.keeper import RayKeeper
from torchmix.service.ray.main import RayStart


class RayMeans(msgspec.Struct, frozen=True, kw_only=True):
    """How many loaders there may be on a cluster; see `RayStart`."""

    address: str
    processes: int | Literal["auto"]
    autoscale: Autoscale | None
    cpu: int | None
    memory_bytes: int | None


class RayLoaders:
    """What a rank holds of them: a folder, the process that keeps them, or nothing."""

    def __init__(self, mirror: FolderMirror | None, keeper: RayKeeper | None) -> None:
        """Made by `open_ray_loaders`."""
        self.mirror, self.keeper = mirror, keeper

    def close(self) -> None:
        """End them; may be called again."""
        if self.keeper is not None:
            self.keeper.close()
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
        nodes: Of the job; public keys of all ranks.
        store: The job's; None where all ranks are in this process.
        own_store: Makes another connection to it.
        prefix: Of the keys of this round.
        rank: Global rank.
        check: Raises while this waits, if a rank is lost.

    Returns:
        What this rank holds, and the folder where its node finds the loaders.

    Raises:
        TorchmixError: On the first rank: there is no cluster, no profile or no room, or ray is not installed.
        OSError: A process cannot be started.
    """
    host = nodes.host_of[rank] if nodes.host_of else rank
    held = RayLoaders(FolderMirror() if rank == host else None, None)
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
            held.keeper = RayKeeper(told)
            if store is not None:
                held.mirror.tell(own_store(), roster)
        elif held.mirror is not None:
            held.mirror.follow(own_store(), roster, check)
        if store is None:
            assert held.mirror is not None
            return held, held.mirror.folder
        if held.mirror is not None:
            store.set(f"{prefix}/folder/{rank}", text_of(str(held.mirror.folder)))
        return held, Path(value_of(store, f"{prefix}/folder/{host}", msgspec.json.Decoder(str).decode, check))
    except BaseException:
        held.close()
        raise
