"""The process that keeps a job's loaders on Ray is killed alone: others are started, and the tensors are the same.

Ray's place is taken by `tests/support/one_machine_ray.py`; what Ray does itself is shown by `test_ray_key.py`.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from tests.support.loaders import Rank, run_job, same_microbatches
from tests.support.one_machine_ray import write_stand_in
from tests.support.processes import wait_until, workers_of_this_process
from tests.support.scaled_jobs import write_scaled_job
from torchmix.parallel import children
from torchmix.parallel.topology import Topology
from torchmix.service.endpoints import registered
from torchmix.stateful.loader import StatefulDataLoader

pytestmark = pytest.mark.system
KEEPER = "service.ray.main"


def write_job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> tuple[Path, Path]:
    """A recipe, and the folder where the run makes its own; what is started finds the stand-in for Ray."""
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4, module=module, sleep_s=0)
    recipe.write_text(recipe.read_text().replace("cpu: 8, memory: 8GiB, autoscale: {min: 1, max: 4}", "cpu: 3"))
    monkeypatch.syspath_prepend(str(write_stand_in(tmp_path)))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return recipe, temporary


def test_a_keeper_that_is_killed_is_replaced_with_its_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, temporary = write_job_of(tmp_path, monkeypatch, "remote_map_of_keeper")

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        [folder] = temporary.glob("torchmix-*")
        for number, microbatch in enumerate(loader):
            rank.microbatches.append(microbatch)
            if number == 5:
                before = {one.endpoint for one in registered(folder)}
                assert len(before) == 2
                [killed] = workers_of_this_process(KEEPER)
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda before=before: is_replaced(folder, before), deadline_s=LONG_S, what="other loaders")
                assert workers_of_this_process(KEEPER) != [killed]
        rank.result = loader.order_digest

    loaders = {"where": "ray", "processes": 2}
    [there] = run_job(recipe, Topology(), max_steps=8, program=program, loaders=loaders)
    [here] = run_job(recipe, Topology(), steps=8)
    assert same_microbatches(here.microbatches, there.microbatches) and there.result == here.digests[-1]
    assert not list(temporary.iterdir()) and not workers_of_this_process(KEEPER)


def is_replaced(folder: Path, before: set[str]) -> bool:
    """Whether there are as many loaders as before, and none of those."""
    now = {one.endpoint for one in registered(folder)}
    return len(now) == len(before) and not now & before


def test_a_keeper_that_cannot_be_started_again_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, temporary = write_job_of(tmp_path, monkeypatch, "remote_map_of_tries")
    whole, failures = children.start_interpreter, [OSError("no more processes")] * 2

    def start(*words: object, **options: object) -> object:
        if tried and failures:
            raise failures.pop()
        return whole(*words, **options)

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        [folder] = temporary.glob("torchmix-*")
        rank.microbatches.append(next(iter(loader)))
        before = {one.endpoint for one in registered(folder)}
        tried.append(True)
        [killed] = workers_of_this_process(KEEPER)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: is_replaced(folder, before), deadline_s=LONG_S, what="other loaders")
        assert not failures

    tried: list[bool] = []
    monkeypatch.setattr(children, "start_interpreter", start)
    run_job(recipe, Topology(), max_steps=8, program=program, loaders={"where": "ray", "processes": 2})
    assert not list(temporary.iterdir()) and not workers_of_this_process(KEEPER)
