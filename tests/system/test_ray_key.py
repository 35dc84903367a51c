"""`loaders: {where: ray}`: loaders of a job on a Ray cluster of several nodes on this machine, and what ends them.

Run with ray installed: `make test-ray`; else these tests are skipped, but for the one that says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import LONG_S
from tests.support.loaders import Rank, run_job, same_microbatches
from tests.support.node_jobs import given, planned
from tests.support.processes import Processes, wait_until, workers_of_this_process
from tests.support.ray_clusters import RAY_MARKS, loader_actors, remove_node_with_actor, started_cluster
from tests.support.scaled_jobs import decisions_of_log, loads_of_job, write_scaled_job
from torchmix.errors import CatalogMissing, OptionError
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import most_steps_of_block, part_of
from torchmix.service.endpoints import registered
from torchmix.service.scale.loads import budget_of_cluster
from torchmix.service.scale.rule import PROGRESS_NAME, ScaleBounds, notes_of, replay
from torchmix.stateful.loader import StatefulDataLoader

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
pytestmark = RAY_MARKS
DEADLINE_S = 2 * LONG_S
CPU_OF_NODE = 3
STEPS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, each with room for all loaders."""
    with started_cluster(nodes=2, cpu=CPU_OF_NODE) as found:
        yield found


def write_job_of(tmp_path: Path, module: str) -> Path:
    """A recipe whose number of loaders does not change."""
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4, module=module, sleep_s=0)
    recipe.write_text(recipe.read_text().replace("cpu: 8, memory: 8GiB, autoscale: {min: 1, max: 4}", "cpu: 3"))
    return recipe


def folder_of(temporary: Path) -> Path:
    """Where the loaders of the only run are registered."""
    [found] = temporary.glob("torchmix-*")
    return found


@needs_ray
def test_loaders_follow_the_coming_load_of_the_job_and_end_again(tmp_path, cluster, monkeypatch):
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4, module="remote_map_scaled", sleep_s=0)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    budget = budget_of_cluster(4, 8 << 30, {})
    block_steps = most_steps_of_block(part_of(load_recipe(recipe), "train"))
    bounds = ScaleBounds(least=1, most=4, budget=budget, block_steps=block_steps)

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        folder, most = folder_of(temporary), 0
        for microbatch in loader:
            rank.microbatches.append(microbatch)
            most = max(most, len(registered(folder)))
        notes = notes_of(folder / PROGRESS_NAME)
        wanted = [
            (one.step, one.reason, [dict(place) for place in one.loaders])
            for one in replay(loads_of_job(recipe), bounds, notes, notes[-1].step + 1)
        ]
        # The first line is the decision before the run began; a run that is first seen later begins again from there.
        wait_until(
            lambda: taken(folder)[-len(wanted) :] == wanted, deadline_s=DEADLINE_S, what=lambda: str(taken(folder))
        )
        counts = [len(loaders) for _, _, loaders in wanted]
        assert max(counts) == 4 and counts[-1] == 1 and most <= 4
        wait_until(lambda: len(registered(folder)) == 1, deadline_s=DEADLINE_S, what="loaders that leave")
        wait_until(lambda: len(loader_actors()) == 1, deadline_s=DEADLINE_S, what="end of the actors")
        rank.result = loader.order_digest

    loaders = {"where": "ray", "address": cluster.address, "cpu": 4}
    [there] = run_job(recipe, Topology(), max_steps=STEPS, program=program, loaders=loaders)
    [here] = run_job(recipe, Topology(), steps=STEPS)
    assert same_microbatches(here.microbatches, there.microbatches) and there.result == here.digests[-1]


def taken(folder: Path) -> list[tuple[int, str, list[dict[str, int]]]]:
    """The decisions that were taken, as they were written."""
    return [(one["step"], one["reason"], one["loaders"]) for one in decisions_of_log(folder)]


@needs_ray
def test_a_job_has_the_same_tensors_when_an_actor_the_keeper_and_a_node_are_lost(tmp_path, cluster, monkeypatch):
    recipe = write_job_of(tmp_path, "remote_map_of_key")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        folder = folder_of(temporary)
        for number, microbatch in enumerate(loader):
            rank.microbatches.append(microbatch)
            now = {one.endpoint for one in registered(folder)}
            if number == 5:
                assert len(now) == 3 == len(loader_actors()) and all(one.public for one in registered(folder))
                os.kill(loader_actors()[0], signal.SIGKILL)
                wait_until(lambda now=now: is_whole(folder, now), deadline_s=DEADLINE_S, what="another actor")
            if number == 12:
                [killed] = workers_of_this_process("service.ray.main")
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda now=now: is_replaced(folder, now), deadline_s=DEADLINE_S, what="another keeper")
                assert workers_of_this_process("service.ray.main") != [killed]
            if number == 20:
                remove_node_with_actor(cluster)  # the other has room for all
                wait_until(lambda now=now: is_whole(folder, now), deadline_s=DEADLINE_S, what="actors of the node")
        rank.result = loader.stats()["loaders_ready"], loader.order_digest

    loaders = {"where": "ray", "address": cluster.address, "processes": 3}
    [there] = run_job(recipe, Topology(), max_steps=8, program=program, loaders=loaders)
    [here] = run_job(recipe, Topology(), steps=8)
    assert same_microbatches(here.microbatches, there.microbatches) and there.result[1] == here.digests[-1]
    assert there.result[0] >= 1
    wait_until(lambda: not loader_actors(), deadline_s=DEADLINE_S, what="end of the actors")
    assert not list(temporary.iterdir()) and not workers_of_this_process("service.ray.main")


def is_whole(folder: Path, before: set[str]) -> bool:
    """Whether there are three loaders again, and some of those before are gone."""
    now = {one.endpoint for one in registered(folder)}
    return len(now) == 3 and bool(before - now)


def is_replaced(folder: Path, before: set[str]) -> bool:
    """Whether there are three loaders, none of those before, and their actors alone run."""
    now = {one.endpoint for one in registered(folder)}
    return len(now) == 3 == len(loader_actors()) and not now & before


@needs_ray
def test_a_job_whose_first_rank_is_killed_leaves_no_actor(tmp_path, cluster):
    recipe = write_job_of(tmp_path, "remote_map_of_killed")
    (tmp_path / "saves").mkdir()
    words = (f"ray,address={cluster.address},processes=2", "1", "1", "1", "2", "9")
    with Processes(tmp_path) as processes:
        program = ("-m", "tests.support.loader_rank", str(recipe), str(tmp_path / "saves"), *words)
        ranks = processes.start_ranks(*program, world_size=2, environment={"HOLD_AT": "2"})
        ranks[0].wait_for_line("step 2", deadline_s=DEADLINE_S)
        assert len(loader_actors()) == 2
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        wait_until(lambda: not loader_actors(), deadline_s=DEADLINE_S, what="end of the actors")
        for rank in ranks:
            wait_until(lambda rank=rank: not rank.session, deadline_s=DEADLINE_S, what="end of all that a rank started")


@needs_ray
def test_nodes_of_a_job_find_loaders_that_come_and_go(tmp_path, cluster):
    recipe = write_job_of(tmp_path, "remote_map_of_nodes")
    topology, steps = Topology(dp=2), 12
    with Processes(tmp_path) as processes, tempfile.TemporaryDirectory() as folder:
        words = {"LOADERS": f"ray,address={cluster.address},processes=auto", "NODES": "2", "TMPDIR": folder}
        program = ("-m", "tests.support.node_rank", str(recipe), str(steps), "1", "1", "1")
        ranks = processes.start_ranks(*program, world_size=2, environment=words)
        found = []
        for rank in ranks:
            assert rank.wait(deadline_s=DEADLINE_S) == 0, processes.report()
            found.append(json.loads(rank.stdout().splitlines()[-1]))
        assert not list(Path(folder).iterdir()), "nothing is left behind"
    assert given(found) == planned(recipe, topology, max_steps=steps)
    assert all(rank["loaders_ready"] >= 1 for rank in found)
    wait_until(lambda: not loader_actors(), deadline_s=DEADLINE_S, what="end of the actors")


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_error_says_what_to_install(tmp_path):
    recipe = write_job_of(tmp_path, "remote_map_without")
    with pytest.raises(OptionError, match=r"pip install ray"):
        run_job(recipe, Topology(), steps=1, loaders={"where": "ray", "processes": "auto"})
    (tmp_path / "job" / "catalog" / "profile.json").unlink()
    for where in ("ray", "job"):
        with pytest.raises(CatalogMissing, match="run torchmix profile"):
            run_job(recipe, Topology(), steps=1, loaders={"where": where, "processes": "auto"})
