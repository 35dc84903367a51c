"""Which rank starts loaders, who may ask them, and where they listen: what the ranks of a job tell each other.

In: the job's store. Out: the first rank of each node learns that it starts loaders, and the public keys of all ranks;
all ranks learn every loader's endpoint and public key. Must hold: no secret is written to the store; a rank that is
lost ends the wait of the others. Cost: two small values a rank, which rank 0 reads, and two from rank 0 to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from torchmix.errors import OptionError
from torchmix.service.endpoints import is_beyond_this_machine
from torchmix.service.job.address import ADDRESS_VARIABLE

JobStore: TypeAlias = Any
"""Torch's `Store`, of which `set`, `get` and `check` are used; its type is not imported here."""
_LONGEST_PAUSE_S = 0.05
_Value = TypeVar("_Value")


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says first."""

    node: str
    """Equal for the ranks of a node."""
    network: str
    """Equal for ranks that reach each other over loopback."""
    public: str
    """Its public key, as a client."""


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 makes of that."""

    hosts: tuple[int, ...]
    """The first rank of each node."""
    host_of: tuple[int, ...] = ()
    """The first rank of each rank's node; empty where one process has all ranks."""
    num_networks: int
    clients: tuple[str, ...]
    """Public keys of all ranks."""


class NearSocket(msgspec.Struct, frozen=True, kw_only=True):
    """Where a loader listens to its own node, without keys."""

    node: str
    network: str
    """The network of the rank that has started it."""
    endpoint: str
    """`ipc:///path`, in a folder of this user alone."""


class NodeLoaders(msgspec.Struct, frozen=True, kw_only=True):
    """The loaders of a node, or of all."""

    public_of: dict[str, str]
    """Public key of each loader, by endpoint."""
    near_of: dict[str, NearSocket] = {}
    """Sockets for the ranks of the loader's own node, by endpoint."""
    parts_of: dict[str, dict[str, int]] = {}
    """Parts of sources that each has, by endpoint; one that is not named reads all."""


_decode_present = msgspec.json.Decoder(Present).decode
_decode_nodes = msgspec.json.Decoder(Nodes).decode
_decode_loaders = msgspec.json.Decoder(NodeLoaders).decode


def nodes_of(
    store: JobStore, prefix: str, own: Present, *, rank: int, world_size: int, check: Callable[[], None]
) -> Nodes:
    """The nodes of the job. A collective.

    Args:
        store: The job's.
        prefix: Of the keys of this round.
        own: What this rank says.
        rank: Global rank.
        world_size: Ranks of the job.
        check: Raises while this waits, if a rank is lost.
    """
    store.set(f"{prefix}/present/{rank}", text_of(own))
    if rank == 0:
        ranks = [value_of(store, f"{prefix}/present/{each}", _decode_present, check) for each in range(world_size)]
        first: dict[str, int] = {}
        for number, each in enumerate(ranks):
            first.setdefault(each.node, number)
        found = Nodes(
            hosts=tuple(first.values()),
            host_of=tuple(first[each.node] for each in ranks),
            num_networks=len({each.network for each in ranks}),
            clients=tuple(each.public for each in ranks),
        )
        store.set(f"{prefix}/nodes", text_of(found))
    return value_of(store, f"{prefix}/nodes", _decode_nodes, check)


def loaders_of_job(
    store: JobStore, prefix: str, own: NodeLoaders | None, nodes: Nodes, *, rank: int, check: Callable[[], None]
) -> NodeLoaders:
    """All loaders of the job. A collective.

    Args:
        store: The job's.
        prefix: Of the keys of this round.
        own: Those that this rank has started; None where it does not.
        nodes: From `nodes_of`.
        rank: Global rank.
        check: Raises while this waits, if a rank is lost.

    Raises:
        OptionError: Loaders of this node listen where other nodes do not reach them.
    """
    if own is not None:
        near = [endpoint for endpoint in own.public_of if not is_beyond_this_machine(endpoint)]
        if near and nodes.num_networks > 1:
            raise OptionError(
                f"loaders of rank {rank} listen at {near[0]}, which the other nodes of the job do not reach: this "
                f"machine comes to the job's store over loopback. Name its address in {ADDRESS_VARIABLE}"
            )
        store.set(f"{prefix}/loaders/{rank}", text_of(own))
    if rank == 0:
        every = [value_of(store, f"{prefix}/loaders/{host}", _decode_loaders, check) for host in nodes.hosts]
        whole = NodeLoaders(
            public_of={key: value for each in every for key, value in each.public_of.items()},
            near_of={key: value for each in every for key, value in each.near_of.items()},
            parts_of={key: value for each in every for key, value in each.parts_of.items()},
        )
        store.set(f"{prefix}/loaders", text_of(whole))
    return value_of(store, f"{prefix}/loaders", _decode_loaders, check)


def text_of(value: object) -> str:
    """A value as the store keeps it."""
    return msgspec.json.encode(value).decode()


def value_of(store: JobStore, key: str, decode: Callable[[bytes], _Value], check: Callable[[], None]) -> _Value:
    """The value of a key, waited for without a limit: a catalog may be made meanwhile, and `check` tells of losses."""
    pause_s = 0.002
    while not store.check([key]):
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return decode(store.get(key))
