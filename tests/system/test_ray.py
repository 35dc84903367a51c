"""Loaders and index shards on a Ray cluster of several nodes on this machine: the same tensors and the same catalog.

Run with ray installed: `make test-ray`; else these tests are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import LONG_S
from tests.support.loaders import run_job, same_microbatches
from tests.support.process_table import command_of, running
from tests.support.processes import Processes, wait_until
from tests.support.projects import make_project
from tests.support.ray_clusters import RAY_MARKS, add_node, loader_actors, remove_node_with_actor, started_cluster
from tests.support.scaled_jobs import write_scaled_job
from torchmix.catalog.manifest import read_manifest
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.service.endpoints import registered
from torchmix.service.keys import write_keys
from torchmix.service.server import new_pair

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = RAY_MARKS
COMMAND = "from torchmix.cli.main import main; raise SystemExit(main())"
ASKED_BRIEFLY = {"RAY_py_gcs_connect_timeout_s": "1", "RAY_gcs_rpc_server_connect_timeout_s": "1"}
BIND = ("--bind", "tcp://127.0.0.1:0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with two processors each."""
    with started_cluster(nodes=2, cpu=2) as found:
        yield found


def started(processes: Processes, recipe: Path, folder: Path, address: str, *words: str) -> Any:
    """Start `torchmix serve --ray`."""
    if not folder.with_name("keys").exists():
        write_keys(folder.with_name("keys"), new_pair, num_clients=1)
    keys = ("--keys", str(folder.with_name("keys")))
    command = ("serve", str(recipe), *BIND, "--ray", address, "--register", str(folder), *keys, *words)
    return processes.start_python("-c", COMMAND, *command, name="serve")


def serve(processes: Processes, recipe: Path, folder: Path, address: str, *words: str) -> Any:
    """Start `torchmix serve --ray` and wait until the loaders listen."""
    child = started(processes, recipe, folder, address, *words)
    child.wait_for_line("loaders listen at", deadline_s=2 * LONG_S)
    return child


def test_loaders_on_a_cluster_give_the_same_tensors_when_actors_and_a_node_are_lost(tmp_path, cluster):
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4, module="remote_map_of_ray", sleep_s=0)
    folder = tmp_path / "endpoints"
    loaders = {"where": "remote", "endpoints": str(folder), "keys": str(tmp_path / "keys")}
    with Processes(tmp_path) as processes:
        child = serve(processes, recipe, folder, cluster.address, "--processes", "3")
        before = {one.endpoint for one in registered(folder)}
        assert len(before) == 3
        there = run_job(recipe, Topology(dp=2), steps=8, loaders=loaders)
        killed = loader_actors()
        assert len(killed) == 3
        os.kill(killed[0], signal.SIGKILL)  # an actor, with its loader
        wait_until(lambda: is_whole(folder, without=1, before=before), deadline_s=LONG_S, what=child.report)
        again = run_job(recipe, Topology(dp=2), steps=8, loaders=loaders)
        moved = {one.endpoint for one in registered(folder)}
        remove_node_with_actor(cluster)
        add_node(cluster, 2)
        wait_until(lambda: is_whole(folder, without=1, before=moved), deadline_s=2 * LONG_S, what=child.report)
        third = run_job(recipe, Topology(dp=2), steps=8, loaders=loaders)
        child.send_signal(signal.SIGTERM)
        assert child.wait(deadline_s=LONG_S) == 0, child.report()
        assert not registered(folder)
    here = run_job(recipe, Topology(dp=2), steps=8)
    for run in (there, again, third):
        for one, other in zip(here, run, strict=True):
            assert same_microbatches(one.microbatches, other.microbatches) and one.digests == other.digests


def is_whole(folder: Path, *, without: int, before: set[str]) -> bool:
    """Whether there are three loaders again, and some of those before are gone."""
    now = {one.endpoint for one in registered(folder)}
    return len(now) == 3 and len(before - now) >= without


def test_a_loader_that_was_lost_again_before_anybody_saw_it_is_not_registered(tmp_path, cluster):
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4, module="remote_map_of_unseen", sleep_s=0)
    folder = tmp_path / "endpoints"
    with Processes(tmp_path) as processes:
        child = serve(processes, recipe, folder, cluster.address, "--processes", "1")
        [before] = registered(folder)
        child.send_signal(signal.SIGSTOP)
        for _ in range(2):  # an actor, and the one that Ray starts in its place
            [killed] = listening()
            os.kill(killed, signal.SIGSTOP)  # so that its loader has no time to do anything
            [loader] = [one.pid for one in running() if one.parent == killed]
            os.kill(loader, signal.SIGKILL)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda killed=killed: len({*listening()} - {killed}) == 1, deadline_s=LONG_S, what="another")
        child.send_signal(signal.SIGCONT)
        wait_until(
            lambda: len(registered(folder)) == 1 and registered(folder) != [before],
            deadline_s=2 * LONG_S,
            what=lambda: f"one loader: {registered(folder)}\n{child.report()}",
        )


def listening() -> list[int]:
    """Process ids of actors that have started their loader: Ray shows what an actor does behind its name."""
    return [pid for pid in loader_actors() if command_of(pid).strip() == "ray::LoaderActor"]


def test_a_command_that_is_killed_leaves_no_actor_and_the_next_one_removes_its_registrations(tmp_path, cluster):
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4, module="remote_map_of_left", sleep_s=0)
    folder = tmp_path / "endpoints"
    loaders = {"where": "remote", "endpoints": str(folder), "keys": str(tmp_path / "keys")}
    with Processes(tmp_path) as processes:
        child = serve(processes, recipe, folder, cluster.address, "--processes", "2")
        child.send_signal(signal.SIGKILL)
        wait_until(lambda: not loader_actors(), deadline_s=2 * LONG_S, what="end of the actors")
        left = {one.endpoint for one in registered(folder)}
        assert len(left) == 2
        again = serve(processes, recipe, folder, cluster.address, "--processes", "1")
        assert len({one.endpoint for one in registered(folder)}) == 1
        assert not left & {one.endpoint for one in registered(folder)}
        [there] = run_job(recipe, Topology(), steps=8, loaders=loaders)
        again.send_signal(signal.SIGTERM)
        assert again.wait(deadline_s=LONG_S) == 0, again.report()
        assert not registered(folder)
    [here] = run_job(recipe, Topology(), steps=8)
    assert same_microbatches(here.microbatches, there.microbatches)


def test_an_index_by_tasks_is_that_of_one_process(tmp_path, cluster):
    alone, spread = make_project(tmp_path / "alone"), make_project(tmp_path / "spread")
    index_recipe(load_recipe(alone), tmp_path / "alone")
    with Processes(tmp_path) as processes:
        words = ("index", str(spread), "--ray", cluster.address, "--shards", "3", "--json")
        child = processes.start_python("-c", COMMAND, *words, name="index")
        assert child.wait(deadline_s=2 * LONG_S) == 0, child.report()
        found = json.loads(child.stdout())
    assert found["resumed_files"] == 4 and found["scanned_files"] in (0, 4)
    one, other = (read_manifest(tmp_path / name / "catalog") for name in ("alone", "spread"))
    assert {name: entry.fingerprint for name, entry in one.sources.items()} == {
        name: entry.fingerprint for name, entry in other.sources.items()
    }


def test_a_shard_that_cannot_be_scanned_is_named(tmp_path, cluster):
    recipe = make_project(tmp_path / "spread")
    (tmp_path / "spread" / "tiny.parquet").write_bytes(b"PAR1 no more")
    with Processes(tmp_path) as processes:
        words = ("index", str(recipe), "--ray", cluster.address, "--shards", "2")
        child = processes.start_python("-c", COMMAND, *words, name="index")
        assert child.wait(deadline_s=2 * LONG_S) == 3
        assert "of 2: " in child.stderr() and "tiny.parquet" in child.stderr()


def test_a_loader_that_cannot_serve_is_named_as_it_is_without_ray(tmp_path, cluster):
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4, module="remote_map_broken", sleep_s=0)
    (tmp_path / "job" / "remote_map_broken.py").write_text("raise RuntimeError('broken here')\n")
    with Processes(tmp_path) as processes:
        child = started(processes, recipe, tmp_path / "endpoints", cluster.address, "--processes", "1")
        assert child.wait(deadline_s=2 * LONG_S) == 2, child.report()
        assert child.stderr().splitlines()[-1].endswith("RuntimeError: broken here"), child.stderr()
        assert "sources.slow.map: importing" in child.stderr() and "Traceback" not in child.stderr()


def test_without_a_cluster_the_command_says_so(tmp_path):
    recipe = make_project(tmp_path / "spread")
    with Processes(tmp_path) as processes, socket.create_server(("127.0.0.1", 0)) as silent:
        for address in ("127.0.0.1:1", f"127.0.0.1:{silent.getsockname()[1]}"):
            words = ("index", str(recipe), "--ray", address)
            child = processes.start_python("-c", COMMAND, *words, name="index", environment=ASKED_BRIEFLY)
            assert child.wait(deadline_s=2 * LONG_S) == 2, child.report()
            assert f"no Ray cluster at '{address}'" in child.stderr()
            assert child.stderr().count("Failed to connect to GCS") <= 1, "it asks once"
