"""One worker a node: shared by its leaders, replaced when it is lost, each page decoded once."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.loaders import run_job, same_microbatches, write_job
from tests.support.node_jobs import DEADLINE_S, STEPS, given, planned, results
from tests.support.node_rank import hash_of
from tests.support.processes import Child, Processes
from tests.support.read_counts import ReadCounts, write_reading
from tests.support.selections import write_rows
from tests.support.worlds import run_ranks
from torchmix.indexing.scan import index
from torchmix.parallel.fan_out import local_world
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def start(
    processes: Processes, job: Path, topology: Topology, *, steps: int = STEPS, **environment: str
) -> list[Child]:
    sizes = map(str, (steps, topology.tp, topology.cp, topology.pp))
    program = ("-m", "tests.support.node_rank", str(job), *sizes)
    return processes.start_ranks(*program, world_size=topology.world_size, environment=environment)


@pytest.mark.parametrize(
    "topology", [Topology(dp=4), Topology(tp=2, dp=2), Topology(cp=2, dp=2), Topology(pp=2, dp=2)], ids=str
)
def test_leaders_of_a_machine_share_a_worker(job: Path, tmp_path: Path, topology: Topology) -> None:
    with Processes(tmp_path) as processes, tempfile.TemporaryDirectory() as folder:
        found = results(processes, start(processes, job, topology, TMPDIR=folder))
        assert not list(Path(folder).iterdir()), "nothing is left behind"
    assert given(found) == planned(job, topology)
    assert [rank["started"] for rank in found] == [1, 0, 0, 0]
    assert not any(rank["left"] for rank in found)


@pytest.mark.parametrize("faults", ["0:SIGSTOP", "5:SIGKILL 15:SIGSTOP"])
def test_a_lost_worker_is_replaced_for_all_leaders(job: Path, tmp_path: Path, faults: str) -> None:
    topology, count = Topology(dp=4), len(faults.split())
    # Blocks double: at the last fault no more than 126 steps can have been made, so the worker is waited for yet.
    steps = 160
    with Processes(tmp_path) as processes:
        ranks = start(processes, job, topology, steps=steps, FAULTS=faults)
        found = results(processes, ranks)
        lines = [line for line in ranks[0].stderr().splitlines() if line.startswith("the node worker")]
    assert given(found) == planned(job, topology, max_steps=steps)
    assert len(lines) == count, ranks[0].report()
    assert all("takes its place for 4 leaders" in line for line in lines)
    assert found[0]["started"] == 1 + count
    assert [rank["workers_lost"] for rank in found] == [count] * 4


def test_leaders_of_one_replica_share_its_steps_too(job: Path) -> None:
    tree = ClientPlaceTree.from_topology(Topology(pp=2, dp=2), leaders="stage")

    def consume(loader: StatefulDataLoader) -> tuple[str, Any]:
        with loader:
            found = hashlib.sha256()
            for microbatch in loader:
                hash_of(microbatch, found)
            return found.hexdigest(), loader.stats()["plan_s"]

    def given_by(loaders: str) -> list[tuple[str, Any]]:
        ends = enumerate(local_world(tree))
        options = {"loaders": loaders, "max_steps": STEPS}
        return run_ranks(
            [build_loader(job, topology=tree.with_rank(rank), fan_out=end, **options) for rank, end in ends],
            consume,
            deadline_s=DEADLINE_S,
        )

    shared, alone = given_by("node"), given_by("in_process")
    assert [tensors for tensors, _ in shared] == [tensors for tensors, _ in alone]
    assert len({seconds for _, seconds in shared}) == 1, "each step was planned once, for all four leaders"
    assert len({seconds for _, seconds in alone}) == 4


def test_nodes_may_be_smaller_than_a_machine(job: Path, tmp_path: Path) -> None:
    topology = Topology(dp=4)
    with Processes(tmp_path) as processes:
        ranks = processes.start_ranks(
            "-c",
            "import os, sys; os.environ['TORCHMIX_NODE'] = str(int(os.environ['RANK']) // 2); "
            f"from tests.support.node_rank import main; main({str(job)!r}, {STEPS}, 1, 1, 1)",
            world_size=4,
        )
        found = results(processes, ranks)
    assert given(found) == planned(job, topology)
    assert [rank["started"] for rank in found] == [1, 0, 1, 0]


def test_a_leader_that_cannot_connect_starts_its_own_and_says_so(job: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)  # longer than the name of a socket may be
    deep.mkdir(parents=True)
    topology = Topology(dp=2)
    with Processes(tmp_path) as processes:
        ranks = start(processes, job, topology, TMPDIR=str(deep))
        found = results(processes, ranks)
        said = ranks[1].stderr()
    assert given(found) == planned(job, topology)
    assert [rank["started"] for rank in found] == [1, 1]
    assert "rank 1 cannot reach the worker of rank 0" in said
    assert not list(deep.iterdir())


@pytest.mark.parametrize(("loaders", "least", "most"), [("node", 1.0, 1.25), ("in_process", 6.0, 9.0)])
def test_a_page_is_decoded_once_for_all_leaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaders: str, least: float, most: float
) -> None:
    recipe, counts = write_reading(tmp_path), ReadCounts(tmp_path / "hook", monkeypatch)
    run_job(recipe, Topology(dp=8), keep=False, one_pass=True, loaders=loaders)
    assert least <= counts.amplification(recipe) <= most


def test_what_is_held_out_comes_from_a_worker_as_from_threads(tmp_path: Path) -> None:
    write_rows(tmp_path / "web.parquet", 0, 600)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        """
version: 1
seed: 3
batch: {samples: 8, length: 64}
sources: {web: {path: web.parquet, tokens: ids, id: url}}
mixture: {web: 1}
hold_out: {validation: {web: 30%}, test: {web: 20%}}
"""
    )
    index(recipe)
    for part in ("train", "validation"):
        threads, worker = (
            run_job(recipe, Topology(dp=2), steps=4, part=part, loaders=loaders) for loaders in ("in_process", "node")
        )
        for of_threads, of_worker in zip(threads, worker, strict=True):
            assert same_microbatches(of_threads.microbatches, of_worker.microbatches)
            assert of_threads.digests == of_worker.digests
