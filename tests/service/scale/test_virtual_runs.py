"""In virtual time: a run whose loaders follow it is not waited for longer than one with a single loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.scaled_jobs import write_scaled_job
from tests.support.virtual_runs import (
    Time,
    VirtualLoader,
    VirtualLoaders,
    VirtualRun,
    cost_of,
    virtual_reader,
    virtual_run,
)
from torchmix.catalog.store import open_part
from torchmix.constructor.arrays import StepMemory
from torchmix.planner.planner import open_planner
from torchmix.reader.protocol import WantedPieces
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.endpoints import Registry
from torchmix.service.fleet import LEAST_BYTES
from torchmix.service.scale.loads import read_profile
from torchmix.service.scale.rule import PROGRESS_NAME, ProgressLog, follow_progress, notes_of
from torchmix.steps.blocks import Consumer, plan_blocks
from torchmix.steps.replica_steps import noted


def runs_of(tmp_path: Path, *, share: str, samples: int, compute_s: float, steps: int) -> list[VirtualRun]:
    """Runs with one loader, and with those that follow, of a job whose load rises at step 140 and falls at step 240."""
    job = {"share": share, "samples": samples, "rise": (140, 190, 240), "web_ns": 300, "rows": 6000}
    recipe = write_scaled_job(tmp_path, least=1, most=7, sleep_s=0.0, module=f"virtual_{samples}", **job)
    run = {"steps": steps, "compute_s": compute_s}
    return [virtual_run(recipe, tmp_path / str(loaders), loaders=loaders, **run) for loaders in (1, "autoscale")]


def test_loaders_come_before_the_block_whose_load_has_risen_is_asked_for(tmp_path: Path) -> None:
    one, scaled = runs_of(tmp_path, share="4%", samples=256, compute_s=0.1, steps=200)
    assert scaled.decisions == [(0, "begin", 1), (0, "begin", 1), (60, "more", 7)], "as many at once as are needed"
    assert scaled.wait_s < 0.2 * one.wait_s, "it was worse than one loader where they came a block later"
    assert scaled.work_s < 1.01 * one.work_s, "nothing is read twice"


def test_loaders_that_come_late_take_what_was_not_asked_for_and_none_ends_that_owes_something(tmp_path: Path) -> None:
    one, scaled = runs_of(tmp_path, share="10%", samples=64, compute_s=0.025, steps=260)
    assert {reason for _, reason, _ in scaled.decisions} == {"begin", "more", "fewer"}
    assert scaled.wait_s < 0.9 * one.wait_s and scaled.lost_s == 0.0


def test_steps_are_noted_before_they_are_asked_for_and_by_the_first_replica_alone(tmp_path: Path) -> None:
    recipe = write_scaled_job(tmp_path, least=1, most=2, sleep_s=0.0, module="virtual_notes", rows=200)
    part = part_of(load_recipe(recipe), "train")
    planner = open_planner(part, open_part(tmp_path / "catalog", part))
    path = follow_progress(tmp_path / "folder")
    for replica, wanted in ((1, [[]] * 3), (0, [[1], [1], [1]])):
        blocks = plan_blocks(planner, planner.start(), 25)
        one = {5: Consumer(replica, StepMemory())}
        said = [
            [note.step for note in notes_of(path)]
            for _ in zip(noted(blocks, ProgressLog((str(path.parent),)), lambda _, one=one: one), wanted, strict=False)
        ]
        assert said == wanted
    assert path.name == PROGRESS_NAME


def test_a_loader_that_has_come_since_the_last_call_is_asked_in_the_next_one(tmp_path: Path) -> None:
    recipe = write_scaled_job(tmp_path, least=1, most=2, sleep_s=0.0, module="virtual_news", rows=400)
    part = part_of(load_recipe(recipe), "train")
    catalog = open_part(tmp_path / "catalog", part)
    profile, time = read_profile(tmp_path / "catalog", catalog, part.seed), Time()
    run, registry = VirtualLoaders(time, cost_of(catalog, profile, 0.0)), Registry(tmp_path / "folder")
    tokens = np.asarray(catalog.sources["web"].sizes.tokens, np.int64)
    whole = WantedPieces.end_to_end(source=1, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens)
    registry.put(run.add(0))
    reader = virtual_reader(catalog, registry.folder, run, time)
    reader.read(whole)
    registry.put(run.add(1))
    time.pass_to(time.now + 60.0)
    reader.read(whole)
    assert [loader.done_s > 0.0 for loader in run.loaders.values()] == [True, True]
    registry.close()


@pytest.mark.parametrize("slow_s", [(30.0, 20.0), (30.0, 0.01)], ids=["all", "one"])
def test_what_a_slow_loader_owes_is_asked_of_another_once_that_owes_nothing(
    tmp_path: Path, slow_s: tuple[float, float]
) -> None:
    recipe = write_scaled_job(tmp_path, least=1, most=2, sleep_s=0.0, module=f"virtual_slow_{slow_s[1]:.0f}", rows=400)
    part = part_of(load_recipe(recipe), "train")
    catalog = open_part(tmp_path / "catalog", part)
    tokens = np.asarray(catalog.sources["web"].sizes.tokens, np.int64)
    whole = WantedPieces.end_to_end(source=1, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens)
    time, registry = Time(), Registry(tmp_path / "folder")
    cost_of_loader: dict[VirtualLoader, float] = {}
    run = VirtualLoaders(time, lambda loader, _: cost_of_loader.get(loader, 0.01))
    for number in range(2):
        registry.put(run.add(number))
    reader = virtual_reader(catalog, registry.folder, run, time)
    reader.read(whole)
    cost_of_loader |= zip(run.loaders.values(), slow_s, strict=True)
    reader.read(whole)
    assert reader.stats()["total_loader_hedged"] == 1
    assert [loader.most_owed for loader in run.loaders.values()] == [1, 1]
    registry.close()


def test_time_that_a_request_waits_behind_others_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchmix.service.fleet_reader.TARGET_BYTES", 4096)
    recipe = write_scaled_job(tmp_path, least=1, most=2, sleep_s=0.0, module="virtual_queue", rows=400)
    part = part_of(load_recipe(recipe), "train")
    catalog, time, registry = open_part(tmp_path / "catalog", part), Time(), Registry(tmp_path / "folder")
    run = VirtualLoaders(time, lambda *_: 0.125)
    registry.put(run.add(0))
    reader = virtual_reader(catalog, registry.folder, run, time)
    tokens = np.asarray(catalog.sources["web"].sizes.tokens, np.int64)
    reader.read(WantedPieces.end_to_end(source=1, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens))
    [one] = reader._fleet.members.all.values()
    assert reader.stats()["total_loader_requests"] > 8 and 0.12 < one.byte_s * LEAST_BYTES < 0.13
    registry.close()
