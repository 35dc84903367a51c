"""What the ranks of a job tell each other of their loaders."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.worlds import run_ranks
from torchmix.errors import OptionError, RankLost
from torchmix.service.keys import KeyPair
from torchmix.service.open_job import fleet_settings
from torchmix.service.roster import NearSocket, NodeLoaders, Nodes, Present, loaders_of_job, nodes_of

PREFIX = "torchmix/loaders/1"


class Store:
    """A store of this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            found = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(found).encode()
        return found

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def told(nodes: list[str], networks: list[str], address: str = "10.0.0.{}") -> tuple[list[Any], Store]:
    """What each rank comes to know."""
    store = Store()

    def program(rank: int) -> tuple[Nodes, NodeLoaders]:
        own = Present(node=nodes[rank], network=networks[rank], public=f"key {rank}")
        found = nodes_of(store, PREFIX, own, rank=rank, world_size=len(nodes), check=lambda: None)
        mine = None
        if rank in found.first_ranks:
            endpoint = f"tcp://{address.format(rank)}:1"
            near = NearSocket(node=nodes[rank], network=networks[rank], endpoint=f"ipc:///run/{rank}")
            mine = NodeLoaders(public_of={endpoint: f"server {rank}"}, near_of={endpoint: near})
        return found, loaders_of_job(store, PREFIX, mine, found, rank=rank, check=lambda: None)

    return run_ranks(range(len(nodes)), program), store


def test_the_first_rank_of_each_node_starts_loaders_and_all_know_all() -> None:
    ranks, store = told(["a", "a", "b", "c", "b"], ["x", "x", "y", "z", "y"])
    nodes = Nodes(
        first_ranks=(0, 2, 3),
        first_of_rank=(0, 0, 2, 3, 2),
        num_networks=3,
        clients=tuple(f"key {rank}" for rank in range(5)),
    )
    loaders = NodeLoaders(
        public_of={f"tcp://10.0.0.{rank}:1": f"server {rank}" for rank in (0, 2, 3)},
        near_of={
            f"tcp://10.0.0.{rank}:1": NearSocket(node=node, network=network, endpoint=f"ipc:///run/{rank}")
            for rank, node, network in ((0, "a", "x"), (2, "b", "y"), (3, "c", "z"))
        },
    )
    assert ranks == [(nodes, loaders)] * 5
    assert all(key.startswith(PREFIX) for key in store.values)


def test_sockets_of_a_node_are_for_its_own_ranks() -> None:
    nears = {
        f"tcp://10.0.0.1:{port}": NearSocket(node=node, network=network, endpoint=f"ipc:///run/{port}")
        for port, (node, network) in enumerate((("a", "x"), ("a", "y"), ("b", "x")))
    }
    loaders = NodeLoaders(public_of=dict.fromkeys(nears, "key"), near_of=nears)
    own = Present(node="a", network="x", public="mine")
    found = fleet_settings(KeyPair(public="mine", secret="secret"), loaders, own, 1.0)
    assert found.near_of == {"tcp://10.0.0.1:0": "ipc:///run/0"}
    assert set(found.endpoints) == set(found.server_of) == set(nears)


def test_nodes_of_one_machine_may_listen_on_loopback() -> None:
    ranks, _ = told(["a", "b"], ["x", "x"], "127.0.0.1")
    assert len({repr(rank) for rank in ranks}) == 1


def test_loopback_is_refused_where_other_machines_take_part() -> None:
    with pytest.raises(OptionError, match=r"loaders of rank 0 listen at tcp://127.0.0.1:1, .*TORCHMIX_ADDRESS"):
        store = Store()
        nodes = Nodes(first_ranks=(0, 1), num_networks=2, clients=())
        mine = NodeLoaders(public_of={"tcp://127.0.0.1:1": "key"})
        loaders_of_job(store, PREFIX, mine, nodes, rank=0, check=lambda: None)


def test_a_lost_rank_ends_the_wait() -> None:
    is_lost = threading.Event()

    def check() -> None:
        if is_lost.is_set():
            raise RankLost("rank 1 is lost", 1)
        is_lost.set()

    own = Present(node="a", network="x", public="key")
    with pytest.raises(RankLost, match="rank 1 is lost"):
        nodes_of(Store(), PREFIX, own, rank=0, world_size=2, check=check)
