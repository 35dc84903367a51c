"""`torchmix serve` with `autoscale`: loaders come and go with the coming load of a real run, as a replay decides.

The source `slow` goes through a map that sleeps 2 ms a row, as one that asks a remote service; its share rises tenfold
in 50 steps, and falls again.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from tests.support.loaders import run_job, same_microbatches
from tests.support.processes import COMMAND_LINE, Processes, wait_until
from tests.support.scaled_jobs import decisions_of_log, loads_of_job, write_scaled_job
from torchmix.cli.run import budget_of
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import most_steps_of_block, part_of
from torchmix.service.endpoints import registered
from torchmix.service.scale.rule import PROGRESS_NAME, ScaleBounds, notes_of, replay

pytestmark = pytest.mark.system
STEPS = 300


def test_loaders_follow_the_coming_load_of_a_run_and_end_again(tmp_path):
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4)
    folder = tmp_path / "endpoints"
    with Processes(tmp_path) as processes:
        words = ("serve", str(recipe), "--register", str(folder))
        server = processes.fork_python(*COMMAND_LINE, *words, name="serve")
        server.wait_for_line("loaders listen at", deadline_s=LONG_S)
        loaders = {"where": "remote", "endpoints": str(folder)}
        there = run_job(recipe, Topology(), steps=STEPS, loaders=loaders)[0]
        notes = notes_of(folder / PROGRESS_NAME)
        block_steps = most_steps_of_block(part_of(load_recipe(recipe), "train"))
        bounds = ScaleBounds(least=1, most=4, budget=budget_of(load_recipe(recipe)), block_steps=block_steps)
        wanted = replay(loads_of_job(recipe), bounds, notes, notes[-1].step + 1)
        wait_until(lambda: len(taken(folder)) > len(wanted), deadline_s=LONG_S, what=lambda: str(taken(folder)))
        # The first line is the decision before the run began; a run that is first seen later begins again from there.
        assert taken(folder)[-len(wanted) :] == [
            (one.step, one.reason, [dict(place) for place in one.loaders]) for one in wanted
        ]
        counts = [len(one.loaders) for one in wanted]
        assert max(counts) == 4 and counts[-1] == 1
        wait_until(lambda: len(registered(folder)) == 1, deadline_s=LONG_S, what="end of the loaders")
        wait_until(lambda: len(server.session) == 2, deadline_s=LONG_S, what="end of the processes")
        server.send_signal(signal.SIGTERM)
        assert server.wait(deadline_s=LONG_S) == 0
        wait_until(lambda: not server.session, deadline_s=LONG_S, what="end of all")
    here = run_job(recipe, Topology(), steps=STEPS)[0]
    assert same_microbatches(here.microbatches, there.microbatches) and here.digests == there.digests


def taken(folder: Path) -> list[tuple[int, str, list[dict[str, int]]]]:
    """The decisions that were taken, as they were written."""
    return [(one["step"], one["reason"], one["loaders"]) for one in decisions_of_log(folder)]


def test_loaders_by_the_profile_register_their_sources(tmp_path):
    recipe = write_scaled_job(tmp_path / "job", least=1, most=4, module="remote_map_of_auto")
    folder = tmp_path / "endpoints"
    with Processes(tmp_path) as processes:
        words = ("serve", str(recipe), "--processes", "auto")
        alone = processes.fork_python(*COMMAND_LINE, *words, name="alone")
        assert alone.wait(deadline_s=LONG_S) == 2 and "--processes auto needs --register DIR" in alone.stderr()
        server = processes.fork_python(*COMMAND_LINE, *words, "--register", str(folder), "--json", name="serve")
        wait_until(lambda: server.stdout().rstrip().endswith("}"), deadline_s=LONG_S, what=server.report)
        listen = json.loads(server.stdout())["endpoints"]
        found = registered(folder)
        assert sorted(one.endpoint for one in found) == sorted(listen)
        assert {name for one in found for name in one.sources or ()} == {"slow", "web"}
        loaders = {"where": "remote", "endpoints": str(folder)}
        there = run_job(recipe, Topology(dp=2), steps=3, loaders=loaders)
    here = run_job(recipe, Topology(dp=2), steps=3)
    for one, other in zip(here, there, strict=True):
        assert same_microbatches(one.microbatches, other.microbatches)
