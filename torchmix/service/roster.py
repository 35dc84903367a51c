"""Which rank starts loaders, who may ask them, and where they listen: what the ranks of a job tell each other."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from torchmix.boards.socket_folders import socket_folder
from torchmix.errors import OptionError
from torchmix.parallel.agreement import pauses
from torchmix.service.endpoints import Registration, Registry, is_beyond_this_machine, registered

# --- Where a node's loaders listen, so that the other nodes of the job reach them.
#
# Cost: a question to the resolver.

ADDRESS_VARIABLE = "TORCHMIX_ADDRESS"
LOOPBACK = "127.0.0.1"
_ANY = ("0.0.0.0", "::", "*")


def own_address(store: tuple[str, int] | None) -> str:
    """An address of this machine: that of TORCHMIX_ADDRESS, else the one that reaches the job's store.

    Args:
        store: Host and port of the store; None where the job has none that is reached over a network.

    Raises:
        OptionError: TORCHMIX_ADDRESS means every address of the machine, or there is no way to the store.
    """
    said = os.environ.get(ADDRESS_VARIABLE, "").strip().strip("[]")
    if said in _ANY:
        raise OptionError(
            f"{ADDRESS_VARIABLE}={said}: other nodes connect to this address; name one of this machine, or an interface"
        )
    if said:
        return said
    if store is None:
        return LOOPBACK
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # chooses the way, and sends nothing
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise OptionError(
            f"no address of this machine is on the way to the job's store at {store[0]}:{store[1]} ({error}); name one "
            f"in {ADDRESS_VARIABLE}"
        ) from error
    return found


def bind_of(address: str) -> str:
    """The endpoint at an address, or at an interface, whose port the system chooses."""
    return f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0"


def network_name() -> str:
    """Equal for processes that reach each other over loopback: those of one machine and one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


# --- Which rank starts loaders, who may ask them, and where they listen: what the ranks of a job tell each other.
#
# No secret is written to the store; a rank that is lost ends the wait of the others. Cost: two small values a rank,
# which rank 0 reads, and two from rank 0 to all.

JobStore: TypeAlias = Any
"""Torch's `Store`, of which `set`, `get`, `check` and `add` are used; its type is not imported here."""
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

    first_ranks: tuple[int, ...]
    """The first rank of each node."""
    first_of_rank: tuple[int, ...] = ()
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
        prefix: The prefix of the keys of this round.
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
            first_ranks=tuple(first.values()),
            first_of_rank=tuple(first[each.node] for each in ranks),
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
        prefix: The prefix of the keys of this round.
        own: Those that this rank has started; None where it does not.
        nodes: From `nodes_of`.
        rank: Global rank.
        check: Raises while this waits, if a rank is lost.

    Raises:
        OptionError: Loaders of this node listen where other nodes do not reach them.
    """
    if own is not None:
        check_reached(own.public_of, nodes, rank)
        store.set(f"{prefix}/loaders/{rank}", text_of(own))
    if rank == 0:
        every = [value_of(store, f"{prefix}/loaders/{first}", _decode_loaders, check) for first in nodes.first_ranks]
        whole = NodeLoaders(
            public_of={key: value for each in every for key, value in each.public_of.items()},
            near_of={key: value for each in every for key, value in each.near_of.items()},
            parts_of={key: value for each in every for key, value in each.parts_of.items()},
        )
        store.set(f"{prefix}/loaders", text_of(whole))
    return value_of(store, f"{prefix}/loaders", _decode_loaders, check)


def check_reached(endpoints: Iterable[str], nodes: Nodes, rank: int) -> None:
    """Refuse loaders of a rank that listen where the other nodes of the job do not reach them.

    Raises:
        OptionError: They listen on loopback.
    """
    near = [endpoint for endpoint in endpoints if not is_beyond_this_machine(endpoint)]
    if near and nodes.num_networks > 1:
        raise OptionError(
            f"loaders of rank {rank} listen at {near[0]}, which the other nodes of the job do not reach: this machine "
            f"comes to the job's store over loopback. Name its address in {ADDRESS_VARIABLE}"
        )


def text_of(value: object) -> str:
    """A value as the store keeps it."""
    return msgspec.json.encode(value).decode()


def value_of(store: JobStore, key: str, decode: Callable[[bytes], _Value], check: Callable[[], None]) -> _Value:
    """The value of a key, waited for without a limit: a catalog may be made meanwhile, and `check` tells of losses."""
    for _ in pauses(_LONGEST_PAUSE_S):
        if store.check([key]):
            break
        check()
    return decode(store.get(key))


# --- The registrations of one node's folder, in the folders of all nodes of a job: what loaders that come and go
# need.
#
# No secret is in it; a folder is of this user alone, and is removed at the end. Cost: a thread, and one small value
# that each node reads from the store once a second.

logger = logging.getLogger(__name__)

LOOK_S = 0.5
_decode = msgspec.json.Decoder(list[Registration]).decode


class FolderMirror:
    """A folder of registrations that follows another one, or that others follow."""

    def __init__(self) -> None:
        """Make the folder."""
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(socket_folder())
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._told: list[Registration] | None = None
        self._registry: Registry | None = None

    def tell(self, store: JobStore, key: str) -> None:
        """Write what the folder has into the store, now and whenever it changes."""
        self._write(store, key)
        self._begin(lambda: self._write(store, key))

    def follow(self, store: JobStore, key: str, check: Callable[[], None]) -> None:
        """Have what the store has, as soon as there is something, and from then on.

        Args:
            store: A connection of its own.
            key: Where another node writes.
            check: Raises while this waits, if a rank is lost.
        """
        self._take(value_of(store, key, _decode, check))
        self._begin(lambda: self._take(_decode(store.get(key))))

    def close(self) -> None:
        """Remove the folder; may be called again."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_S)  # the store may not answer any more
        if self._registry is not None:
            self._registry.close()
        self._stack.close()

    def _begin(self, look: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=[look], name="torchmix-mirror", daemon=True)
        self._thread.start()

    def _run(self, look: Callable[[], None]) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                look()
            except (OSError, RuntimeError, msgspec.MsgspecError) as error:  # the store ends with its job
                logger.debug("loaders are not followed: %s", error)

    def _write(self, store: JobStore, key: str) -> None:
        now = registered(self.folder)
        if now != self._told:
            store.set(key, text_of(now))
            self._told = now

    def _take(self, now: list[Registration]) -> None:
        if now == self._told or self._is_over.is_set():
            return
        if self._registry is None:
            self._registry = Registry(self.folder)
        self._registry.hold(now)
        self._told = now
