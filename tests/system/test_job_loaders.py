"""Loaders that a job starts on its nodes: one fleet, the tensors of a run without it, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.loaders import Rank, run_job, write_job
from tests.support.node_rank import hash_of
from tests.support.processes import Child, Processes, wait_until
from tests.support.read_counts import NUM_LINES, ReadCounts, write_reading
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader

pytestmark = pytest.mark.system
STEPS = 24
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def hashed(loader: StatefulDataLoader, rank: Rank) -> None:
    found = hashlib.sha256()
    for microbatch in loader:
        hash_of(microbatch, found)
    rank.result = found.hexdigest(), loader.order_digest


def planned(job: Path, topology: Topology, **options: Any) -> list[tuple[str, str]]:
    """Of each rank, a hash of all tensors and the digest, as threads of leaders make them."""
    return [rank.result for rank in run_job(job, topology, program=hashed, **{"max_steps": STEPS, **options})]


def start(
    processes: Processes, job: Path, topology: Topology, *, nodes: int, steps: int = STEPS, **environment: str
) -> list[Child]:
    """Ranks of a job whose machine stands for several nodes, with two loaders each."""
    sizes = map(str, (steps, topology.tp, topology.cp, topology.pp))
    words = {"LOADERS": "job,processes=2", "NODES": str(nodes), **environment}
    program = ("-m", "tests.support.node_rank", str(job), *sizes)
    return processes.start_ranks(*program, world_size=topology.world_size, environment=words)


def results(ranks: list[Child]) -> list[dict[str, Any]]:
    for rank in ranks:
        assert rank.wait(deadline_s=DEADLINE_S) == 0, rank.report()
    for rank in ranks:
        wait_until(lambda rank=rank: not rank.session, deadline_s=DEADLINE_S, what="end of all that a rank has started")
    return [json.loads(rank.stdout().splitlines()[-1]) for rank in ranks]


def given(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(rank["hash"], rank["digest"]) for rank in found]


@pytest.mark.parametrize(
    ("topology", "nodes", "hosts"),
    [(Topology(dp=4), 2, [2, 0, 2, 0]), (Topology(tp=2, pp=2), 4, [2, 2, 2, 2])],
    ids=["dp4 on 2 nodes", "one leader on 4 nodes"],
)
def test_nodes_of_a_job_read_for_each_other(
    job: Path, tmp_path: Path, topology: Topology, nodes: int, hosts: list[int]
) -> None:
    with Processes(tmp_path) as processes, tempfile.TemporaryDirectory() as folder:
        found = results(start(processes, job, topology, nodes=nodes, TMPDIR=folder))
        assert not list(Path(folder).iterdir()), "nothing is left behind"
    assert given(found) == planned(job, topology)
    assert [rank["loaders"] for rank in found] == hosts
    assert not any(rank["left"] for rank in found)
    asking = [rank for rank in found if "loaders_ready" in rank]
    assert asking and all(rank["loaders_ready"] == sum(hosts) for rank in asking)


def test_a_job_of_four_nodes_reads_and_encodes_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(dp=8)
    recipe = write_reading(tmp_path)
    oracle = planned(recipe, topology, max_steps=None, one_pass=True)
    counts = ReadCounts(tmp_path / "hook", monkeypatch)
    with Processes(tmp_path) as processes:
        found = results(start(processes, recipe, topology, nodes=4, steps=0))
    assert given(found) == oracle
    assert counts.amplification(recipe) <= 1.25
    assert 0.9 * NUM_LINES < counts.rows_encoded <= 1.05 * NUM_LINES
