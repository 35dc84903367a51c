"""A worker that is started early is the one that is used, or none is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchmix
from tests.support.loaders import write_job
from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.recipe.structs import Loaders
from torchmix.steps.worker import keeper as keepers
from torchmix.steps.worker.early import start_for_node, start_worker
from torchmix.steps.worker.keeper import (
    NodeKeeper,
    NodeOptions,
    end_waiting,
    keeper_of,
    options_of,
    start_ahead,
)
from torchmix.steps.worker.open_node import open_node

OPTIONS = NodeOptions(cpu=1)


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    waiting = [keeper.pid for _, keeper in keepers._waiting]
    end_waiting()
    assert not keepers._waiting and not any(map(runs, waiting))


def runs(pid: int) -> bool:
    """Whether it is a process that nobody has waited for."""
    return Path(f"/proc/{pid}").exists()


def waiting() -> list[int]:
    """The worker that waits, if one does."""
    return [keeper.pid for _, keeper in keepers._waiting]


def end(keeper: NodeKeeper) -> None:
    keeper.end(0.0, patience_s=0.0)
    assert not runs(keeper.pid)


def test_the_worker_that_waits_is_taken_once() -> None:
    start_ahead(OPTIONS)
    [pid] = waiting()
    start_ahead(OPTIONS)
    assert waiting() == [pid] and runs(pid)
    keeper = keeper_of(OPTIONS)
    assert keeper.pid == pid and not waiting()
    end(keeper)


def test_a_worker_with_other_options_is_ended() -> None:
    start_ahead(OPTIONS)
    [pid] = waiting()
    keeper = keeper_of(NodeOptions(cpu=2))
    assert keeper.pid != pid and not runs(pid) and runs(keeper.pid)
    end(keeper)


def test_open_node_takes_the_worker_and_the_next_loader_starts_none() -> None:
    tree = ClientPlaceTree.from_topology(Topology())
    start_for_node(tree, OPTIONS)
    [pid] = waiting()
    node = open_node(tree, OPTIONS)
    try:
        start_for_node(tree, OPTIONS)
        assert not waiting() and runs(pid)
    finally:
        node.leave()
    assert not runs(pid)


def test_of_a_job_the_leader_starts_one_that_is_likely_to_be_a_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(rank: int, local_rank: str | None) -> bool:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
        start_for_node(ClientPlaceTree.from_topology(Topology(dp=2, tp=2, rank=rank)), OPTIONS)
        found = bool(waiting())
        end_waiting()
        return found

    assert started(0, None) and started(2, "0")
    assert not started(2, None) and not started(2, "2") and not started(1, "0")


def test_a_copy_in_a_fork_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ahead(OPTIONS)
    [(_, parents)] = keepers._waiting
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        keeper = keeper_of(OPTIONS)
        assert keeper is not parents and runs(parents.pid)
        end(keeper)
    end(parents)


def test_start_worker_starts_what_build_loader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    start_worker()
    assert not waiting(), "the first rank of the machine starts the worker"
    monkeypatch.setenv("LOCAL_RANK", "0")
    start_worker("in_process")
    assert not waiting()
    torchmix.start_worker("cpu=1")
    [pid] = waiting()
    keeper = keeper_of(options_of(Loaders(cpu=1), ()))
    assert keeper.pid == pid
    end(keeper)


@pytest.mark.parametrize(("asked", "count"), [("cpu=1", 1), ("cpu=2", 2)], ids=["its options", "others"])
def test_the_worker_ends_with_a_build_loader_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, count: int
) -> None:
    started: list[int] = []

    def noted(options: NodeOptions) -> NodeKeeper:
        keeper = NodeKeeper(options)
        started.append(keeper.pid)
        return keeper

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(keepers, "NodeKeeper", noted)
    start_worker(asked)
    with pytest.raises(TopologyError, match=r"torch\.distributed is not initialised"):  # says what watches the ranks
        torchmix.build_loader(write_job(tmp_path), topology=Topology(dp=2), loaders="node,cpu=1")
    assert len(started) == count
    assert not waiting() and not any(map(runs, started))


def test_the_worker_ends_with_a_build_loader_that_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    torchmix.start_worker()
    [pid] = waiting()
    with torchmix.build_loader(write_job(tmp_path), topology=Topology(), loaders="in_process"):
        assert not waiting() and not runs(pid)
