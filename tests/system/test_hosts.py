"""Jobs over several hosts, each with a network, processes and a name of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hosts import Host, hosts, start_on
from tests.support.loaders import write_job
from tests.support.node_jobs import DEADLINE_S, STEPS, planned
from tests.support.patient_fleets import patient_path
from tests.support.processes import Child, Processes, wait_until
from torchmix.parallel.topology import Topology

pytestmark = pytest.mark.system


def start(processes: Processes, places: list[Host], job: Path, topology: Topology, **environment: str) -> list[Child]:
    """Ranks in order over the hosts, as torchrun would start them."""
    sizes = map(str, (STEPS, topology.tp, topology.cp, topology.pp))
    words = {"LOADERS": "job,processes=2", **environment}
    return start_on(processes, places, topology.world_size, "tests.support.node_rank", str(job), *sizes, **words)


def test_hosts_of_a_job_read_for_each_other(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    topology = Topology(dp=2)
    with hosts(2) as places, Processes(tmp_path) as processes:
        ranks = start(processes, places, job, topology, PYTHONPATH=patient_path(tmp_path / "site"))
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
        for rank in ranks:
            wait_until(lambda rank=rank: not rank.session, deadline_s=DEADLINE_S, what="end of all on a host")
        found = [json.loads(rank.stdout().splitlines()[-1]) for rank in ranks]
    assert [(rank["hash"], rank["digest"]) for rank in found] == planned(job, topology)
    assert [rank["loaders_ready"] for rank in found] == [4, 4]
    assert all(rank["total_loader_requests"] for rank in found)


def test_an_address_that_other_hosts_do_not_reach_is_an_error_on_all(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    with hosts(2) as places, Processes(tmp_path) as processes:
        ranks = start(processes, places, job, Topology(dp=2), TORCHMIX_ADDRESS="127.0.0.1")
        assert all(rank.wait(deadline_s=DEADLINE_S) for rank in ranks), processes.report()
        said = [rank.stderr() for rank in ranks]
    assert any("the other nodes of the job do not reach" in text for text in said)
    assert all("TORCHMIX_ADDRESS" in text for text in said)
