"""Nodes of a job follow one run: the first decides, each has its own loaders, and all know all of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.service.job.test_roster import Store
from tests.service.scale.test_rule import ROOMY, ramp, steps_of
from tests.service.scale.test_scaling import Seats
from tests.support.worlds import run_ranks
from torchmix.errors import LoaderLost, OptionError, RankLost
from torchmix.service.endpoints import KeysOfFolders, Registry, registered
from torchmix.service.scale.nodes import ScaledNode
from torchmix.service.scale.rule import ProgressLog, ScaleBounds

NODES = 3
BOUNDS = ScaleBounds(least=NODES, most=8 * NODES, budget=ROOMY, nodes=NODES)


class NodeSeats(Seats):
    """Loaders of a node that are registered and do nothing else."""

    def __init__(self, folder: Path, node: int) -> None:
        super().__init__()
        self.registry, self.node = Registry(folder), node

    def endpoint(self, number: int) -> str:
        return f"tcp://10.0.0.{self.node}:{number}"

    def start(self, number, sources, memory_bytes, cache_part):
        super().start(number, sources, memory_bytes, cache_part)
        self.give(number, sources)

    def give(self, number, sources):
        super().give(number, sources)
        self.registry.put(self.endpoint(number), sources, f"key {self.node}", f"ipc:///run/{number}")

    def leave(self, number):
        super().leave(number)
        self.registry.remove(self.endpoint(number))

    def stop(self, number):
        self.registry.remove(self.endpoint(number))
        super().stop(number)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each look is the test's: the threads of nodes wait for an hour."""
    monkeypatch.setattr("torchmix.service.scale.nodes.LOOK_S", 3600.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def begun(base: Path, store: Store, node: int, **options: Any) -> tuple[ScaledNode, NodeSeats]:
    """A node with its loaders."""
    folder = base / f"node-{node}"
    seats = NodeSeats(folder, node)
    seats.refuse = options.pop("refuse", set())
    loads_of = steps_of(ramp) if node == 0 else None
    given = {"node": node, "loads_of": loads_of, "store": store, "prefix": "run", "is_over": threading.Event()}
    return ScaledNode(seats, folder, BOUNDS, **{**given, **options}), seats


def known(node: ScaledNode) -> dict[str, dict[str, int]]:
    """What clients of a node find."""
    return {one.endpoint: one.sources for folder in node.folders for one in registered(Path(folder))}


def test_a_run_is_followed_on_all_nodes(turns: None, tmp_path: Path) -> None:
    store = Store()
    found = run_ranks(range(NODES), lambda node: begun(tmp_path, store, node))
    nodes, seats = [node for node, _ in found], [each for _, each in found]
    try:
        assert [sorted(each.here) for each in seats] == [[0], [1], [2]]
        whole = {each.endpoint(number): sources for each in seats for number, sources in each.here.items()}
        assert [known(node) for node in nodes] == [whole] * NODES, "from the first step on"
        keys = KeysOfFolders([Path(folder) for folder in nodes[1].folders])
        assert keys["tcp://10.0.0.0:0"] == "key 0" and keys["tcp://10.0.0.1:1"] == "key 1"
        assert keys.near_of == {"tcp://10.0.0.1:1": "ipc:///run/1"}, "sockets are for their own node"
        run, counts = ProgressLog(nodes[0].folders), set()
        for step in range(1, 601):
            run.note(step, frozenset(), {})
            if step % 9 == 0:
                for turn in (nodes, nodes[:1], nodes):  # what one has told, the others hear when they look
                    for node in turn:
                        node.look()
                assert len({len(each.here.keys() - each.gone) for each in seats}) == 1, "as many on each node"
                whole = {
                    each.endpoint(number): sources
                    for each in seats
                    for number, sources in each.here.items()
                    if number not in each.gone
                }
                assert [known(node) for node in nodes] == [whole] * NODES
                counts.add(len(whole))
        assert max(counts) == 18 and len(whole) == 3, "44 ms, where 8 ms are three loaders'"
        asked = store.values["run/news"]
        store.get = None  # type: ignore[assignment]
        for node in nodes:
            node.look()
        assert store.values["run/news"] == asked, "a node where nothing is new tells and reads nothing"
    finally:
        for node in nodes:
            node.close()
    assert not any(each.here for each in seats)
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith("torchmix-")] == []


def test_a_node_that_has_missed_decisions_does_the_last_one(turns: None, tmp_path: Path) -> None:
    store = Store()
    found = run_ranks(range(NODES), lambda node: begun(tmp_path, store, node))
    nodes, seats = [node for node, _ in found], [each for _, each in found]
    run = ProgressLog(nodes[0].folders)
    for step in range(1, 300):
        run.note(step, frozenset(), {})
        nodes[0].look()
    nodes[2].look()
    assert [len(each.here) for each in seats] == [6, 1, 6]
    seats[0].registry.close()  # the first node is lost: its loaders have ended
    nodes[0].look()
    nodes[1].look()
    assert len(seats[1].here) == 6 and not any("10.0.0.0" in endpoint for endpoint in known(nodes[1]))
    store.values.clear()
    before = known(nodes[2])
    with pytest.raises(KeyError):
        nodes[2].look()
    assert known(nodes[2]) == before, "what the store has lost changes nothing"
    for node in nodes:
        node.close()


def test_what_fails_at_the_start_ends_what_was_started(turns: None, tmp_path: Path) -> None:
    def refuse(endpoints: list[str]) -> None:
        raise OptionError(f"nobody reaches {endpoints}")

    def check() -> None:
        raise RankLost("rank 0 is lost", 0)

    for node, options, error in (
        (0, {"refuse": {0}}, LoaderLost),
        (0, {"check_reached": refuse}, OptionError),
        (1, {"check": check}, RankLost),
    ):
        base = tmp_path / error.__name__
        with pytest.raises(error):
            begun(base, Store(), node, **options)
        assert registered(base / f"node-{node}") == []
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith("torchmix-")] == []
