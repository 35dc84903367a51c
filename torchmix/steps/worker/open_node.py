"""Which leaders share a worker, and how they come to it.

Leaders whose processes see each other are a node, unless TORCHMIX_NODE says otherwise; the first of them is the
keeper; a leader that cannot connect has a worker of its own, and says so; nobody of another user gets in. A
collective: all leaders call it, as often and in the same order. Cost: a few requests to the store, once for all
loaders that are open together.

The keeper's socket lies in a fresh folder that only its user may enter, and is removed when all have connected.
Before, the keeper removes the folders of dead runs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from torchmix.boards.socket_folders import SOCKET, socket_folder
from torchmix.errors import RankLost
from torchmix.parallel.agreement import times_met
from torchmix.parallel.liveness.evidence import identity_of_this_process
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.steps.worker.client import NodeHold
from torchmix.steps.worker.keeper import NodeKeeper, NodeOptions, end_waiting, keeper_of
from torchmix.steps.worker.messages import (
    Channel,
    Hello,
    Welcome,
    decode_hello,
    decode_keeper_reply,
    encode,
    open_files_named,
)

logger = logging.getLogger(__name__)

NODE_VARIABLE = "TORCHMIX_NODE"
HELLO_S = 10.0
"""How long a process that has connected may take to say who it is."""
_PAUSE_S = 0.05
_LOOK_S = 0.5
_HIGHEST_PATH_BYTES = 107
_lock = threading.Lock()
_open: list[tuple[object, NodeOptions, str, NodeHold]] = []
"""Those that this process holds, with the store and the leaders each is for."""

NodeStore: TypeAlias = Any
"""Torch's `Store`, of which `set`, `get`, `check` and `timeout` are used; its type is not imported here."""


def open_node(
    tree: ClientPlaceTree,
    options: NodeOptions,
    *,
    store: NodeStore | None = None,
    check: Callable[[], None] = lambda: None,
) -> NodeHold:
    """This leader's hold on the worker of its node; `leave` it with the loader.

    Args:
        tree: The place tree as this leader sees it.
        options: How workers run.
        store: The job's; None where all leaders are in this process.
        check: Raises while this waits, if a rank is lost.

    Raises:
        OSError: The worker cannot be started.
        OpenFilesLimit: This process has as many open files as it may.
        RankLost: A leader of this node has not come within the store's timeout.
    """
    with _lock:
        leaders = _short(repr((tree.leader_of_rank, tree.replica_of_rank)))
        _open[:] = [entry for entry in _open if not entry[3].is_closed]
        for of_store, of_options, of_leaders, node in _open:
            if of_store is store and (of_options, of_leaders) == (options, leaders):
                return node.join()
        if store is None:
            node = _own_node(options, {rank: tree.replica_of_rank[rank] for rank in tree.leaders})
        else:
            times = times_met(store, f"node/{leaders}", tree.topology.rank)
            prefix = f"torchmix/node/{leaders}/{times}"
            node = _node_of_job(tree, options, store, prefix, check)
        _open.append((store, options, leaders, node))
        return node.join()


def node_name() -> str:
    """Equal for processes that may share a worker; empty for one that must have its own."""
    space = identity_of_this_process().pid_space
    return f"{space} {os.environ.get(NODE_VARIABLE, '')}" if space else ""


def _admitted(keeper: NodeKeeper) -> Channel:
    """A road to a keeper in this process."""
    with open_files_named():
        ours, theirs = socket.socketpair()
    keeper.admit(Channel(theirs))
    return Channel(ours)


def _own_node(options: NodeOptions, replica_of: dict[int, int]) -> NodeHold:
    keeper = keeper_of(options)
    return NodeHold(_admitted(keeper), replica_of=replica_of, keeper=keeper)


def _node_of_job(
    tree: ClientPlaceTree, options: NodeOptions, store: NodeStore, prefix: str, check: Callable[[], None]
) -> NodeHold:
    own = tree.topology.rank
    name = node_name()
    store.set(f"{prefix}/who/{own}", name)
    if own == tree.leaders[0]:
        _publish_nodes(store, prefix, tree.leaders, check)
    leaders = [own]
    if name:
        leaders = msgspec.json.decode(_await(store, f"{prefix}/{_short(name)}", check), type=list[int])
    if len(leaders) == 1:
        return _own_node(options, {own: tree.replica})
    if own == leaders[0]:
        return _keep_node(tree, leaders, options, store, prefix, check)
    end_waiting()
    path = _await(store, f"{prefix}/path/{leaders[0]}", check).decode()
    try:
        road, replica_of = _connect(path, own, check)
    except (OSError, EOFError) as error:
        logger.warning(
            "rank %d cannot reach the worker of rank %d at %r (%s), and starts one of its own",
            own,
            leaders[0],
            path,
            error,
        )
        store.set(f"{prefix}/alone/{own}", "")
        return _own_node(options, {own: tree.replica})
    return NodeHold(road, replica_of=replica_of)


def _publish_nodes(store: NodeStore, prefix: str, leaders: tuple[int, ...], check: Callable[[], None]) -> None:
    """Say of each node which leaders it has: one leader asks for all names, and each reads its own node's."""
    nodes: dict[str, list[int]] = {}
    for rank in leaders:
        nodes.setdefault(_await(store, f"{prefix}/who/{rank}", check).decode(), []).append(rank)
    for name, ranks in nodes.items():
        store.set(f"{prefix}/{_short(name)}", msgspec.json.encode(sorted(ranks)).decode())


def _keep_node(
    tree: ClientPlaceTree,
    leaders: list[int],
    options: NodeOptions,
    store: NodeStore,
    prefix: str,
    check: Callable[[], None],
) -> NodeHold:
    own = tree.topology.rank
    keeper = keeper_of(options)  # first: its imports take longer than all of this
    with socket_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(folder / SOCKET)
        if len(os.fsencode(path)) <= _HIGHEST_PATH_BYTES:  # else nobody can connect, and each says so
            listener.bind(path)
            listener.listen(len(leaders))
        store.set(f"{prefix}/path/{own}", path)
        roads = _accept(listener, leaders[1:], store, prefix, check)
    replica_of = {rank: tree.replica_of_rank[rank] for rank in (own, *roads)}
    for road in roads.values():
        with suppress(EOFError):  # it has gone: liveness tells
            road.send(encode(Welcome(replica_of=replica_of)))
        keeper.admit(road)
    return NodeHold(_admitted(keeper), replica_of=replica_of, keeper=keeper)


def _accept(
    listener: socket.socket, ranks: list[int], store: NodeStore, prefix: str, check: Callable[[], None]
) -> dict[int, Channel]:
    """A road to each leader that connects, by rank; leaders that have said that they cannot are left out."""
    roads: dict[int, Channel] = {}
    listener.settimeout(_PAUSE_S)
    limit_s = time.monotonic() + store.timeout.total_seconds()
    while missing := [rank for rank in ranks if rank not in roads and not store.check([f"{prefix}/alone/{rank}"])]:
        check()
        if time.monotonic() > limit_s:
            raise RankLost(f"leaders {missing} of this node have not come to their worker", missing[0])
        try:
            end, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:  # it does not listen
            time.sleep(_PAUSE_S)
            continue
        road = Channel(end)
        try:
            _check_user(end)
            rank = decode_hello(road.receive(HELLO_S)[0]).rank
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            logger.warning("a process that is no leader of this node came to its worker's socket: %s", error)
            road.close()
            continue
        roads[rank] = road
    return roads


def _connect(path: str, rank: int, check: Callable[[], None]) -> tuple[Channel, dict[int, int]]:
    end = socket.socket(socket.AF_UNIX)
    road = Channel(end)
    try:
        end.connect(path)
        _check_user(end)
        road.send(encode(Hello(rank=rank)))
        while True:  # until all leaders of the node have come
            check()
            try:
                reply = decode_keeper_reply(road.receive(_LOOK_S)[0])
            except TimeoutError:
                continue
            if isinstance(reply, Welcome):
                return road, reply.replica_of
    except BaseException:
        road.close()
        raise


def _check_user(road: socket.socket) -> None:
    """Refuse a process of another user.

    Raises:
        PermissionError: It is of another.
    """
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", road.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise PermissionError(f"process {pid} is of user {uid}, this one is of user {os.geteuid()}")


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _await(store: NodeStore, key: str, check: Callable[[], None]) -> bytes:
    limit_s, pause_s = time.monotonic() + store.timeout.total_seconds(), 0.002
    while not store.check([key]):
        check()
        if time.monotonic() > limit_s:
            raise RankLost(f"no leader has written {key}; all leaders of the job must build the same loaders", -1)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)
    value: bytes = store.get(key)
    return value
