"""One liveness for all loaders of a rank, over the store of the job.

All ranks open and close their loaders in one order, so all share alike, or none. Cost: a connection to the store;
nothing for later loaders.
"""

from __future__ import annotations

import os
import uuid

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore  # typed here alone

from torchmix.errors import OptionError
from torchmix.parallel.agreement import await_key, times_met
from torchmix.parallel.groups import check_job
from torchmix.parallel.liveness.evidence import Patience
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology

_open: tuple[Store, Liveness] | None = None
"""The one opened last, and the store it is for."""
_kept_stores: list[Store] = []
"""The server of a store ends with its last reference: kept from `destroy_process_group` to the process' end."""


def open_liveness(tree: ClientPlaceTree, *, patience: Patience | None = None, is_elastic: bool = False) -> Liveness:
    """Begin to watch and to be watched. A collective: all ranks call it, as often and in the same order.

    While another loader of this rank is open, its liveness is shared.

    Args:
        tree: The place tree as this rank sees it.
        patience: Other limits than the default; of the first loader.
        is_elastic: A lost rank ends no process. Whoever asks hears of the loss.

    Raises:
        OptionError: Another loader is open that is elastic where this one is not, or the other way.
        TopologyError: torch.distributed is not initialised, or disagrees with the tree.
        RankLost: A rank failed before it came here, and told so (`agreement.announcing_failures`).
    """
    global _open
    topology = tree.topology
    if topology.world_size == 1:
        return Liveness(HashStore(), rank=0, world_size=1)
    check_job(topology)
    default = dist.distributed_c10d._get_default_store()
    if _open is not None and _open[0] is default and not _open[1].is_closed:
        if _open[1].is_elastic != is_elastic:
            raise OptionError("build_loader: loaders that are open together are all elastic, or none is")
        return _open[1].join()
    own, store_rank = _connect(default)
    # The default store is asked once, here: it separates attempts of torchrun, and its later use is not ours to delay.
    key = f"torchmix/liveness/{times_met(default, 'liveness', topology.rank)}"
    run = uuid.uuid4().hex if topology.rank == 0 else await_key(default, key, rank=topology.rank).decode()
    liveness = Liveness(
        PrefixStore(f"torchmix/{run}", own),
        rank=topology.rank,
        world_size=topology.world_size,
        store_rank=store_rank,
        patience=patience,
        is_elastic=is_elastic,
    )
    if topology.rank == 0:
        default.set(key, run)
    liveness.listen_for_termination(_ranks_of_host(topology))
    if store_rank == topology.rank:
        _kept_stores.append(default)
    _open = (default, liveness)
    return liveness


def store_address(store: Store) -> tuple[str, int] | None:
    """Host and port of a job's store, or else of the launcher's variables; None where there are none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store.host, store.port
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        return None


def own_connection(store: Store) -> Store:
    """Another connection to the store behind `store`: one that waits holds up nobody else."""
    return PrefixStore("torchmix", _connect(store)[0])


def _ranks_of_host(topology: Topology) -> range:
    """The ranks that torchrun has started on this host; where another launcher did, the next rank alone."""
    try:
        first, count = topology.rank - int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        first, count = topology.rank + 1, 1
    return range(max(0, first), min(first + count, topology.world_size))


def _connect(store: Store) -> tuple[Store, int]:
    """A connection of our own to the store behind `store`, and the rank that serves it, -1 for none.

    A request that waits holds a connection, and the training's own requests may wait for minutes.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        own = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        return own, -1 if is_launchers else 0
    if isinstance(store, FileStore):
        return FileStore(str(store.path)), -1  # type: ignore[attr-defined]  # missing from its stub
    return store, -1
