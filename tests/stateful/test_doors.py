"""The low-level doors: with the recipe's own choices they give the loader's plans and tensors; what breaks a rule is
refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.stateful.test_runs_of_ranks import with_runs
from tests.support.files import make_text_file
from tests.support.loaders import run_job, same_microbatches, write_job
from tests.support.maps import recipe_of_map, write_functions
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import open_catalog
from torchmix.errors import PlanError, TopologyError
from torchmix.indexing.scan import index_recipe
from torchmix.mixture.keys import hash_columns, named_key
from torchmix.parallel.place_tree import Layout, Role
from torchmix.parallel.topology import Topology
from torchmix.planner.planner import Planner, open_planner
from torchmix.planner.plans import DEFERRED, Summary, cursor_after, placement_of, plan_raw, summary_buffer
from torchmix.reader.reader import Reader
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.sources import maps_of
from torchmix.stateful.doors import constructor_do_plan, loader_do_plan

ONLY = Role(stage="only", cp_rank=0)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def opened(job: Path, **layout: int) -> tuple[Planner, Reader]:
    recipe = load_recipe(job)
    part = part_of(recipe, "train")
    catalog = open_catalog(job.parent / recipe.catalog, settings_of(part.sources, part.shuffle))
    return open_planner(part, catalog, Layout(**layout)), Reader(catalog, job.parent, cache_bytes=1 << 24)


def own_columns(summary: Summary) -> dict[str, Any]:
    return {name: summary.columns[name].copy() for name in ("sample", "slot")}


def test_the_doors_give_the_loaders_plans_and_tensors(job: Path) -> None:
    planner, reader = opened(job, dp=2)
    ranks = run_job(job, Topology(dp=2), microbatches=8)
    cursor = planner.start()
    microbatches: list[list[Any]] = [[], []]
    for _ in range(2):
        expected, after = planner.step(cursor)
        summary = summary_buffer(planner, cursor)
        own = own_columns(summary)
        plan = plan_raw(summary, own["sample"], {"backbone": expected.placement}, slot_of_piece=own["slot"])
        assert (plan.order_digest, plan.plan_digest) == (expected.order_digest, expected.plan_digest)
        for rank in range(2):
            tensors = constructor_do_plan(plan, loader_do_plan(plan, reader, rank), ONLY, part=planner.part)
            microbatches[rank] += tensors.microbatches()
        cursor = cursor_after(summary, plan, own["sample"])
        assert cursor.order_digest == after.order_digest and len(cursor.pool) == len(after.pool)
    reader.close()
    for rank in range(2):
        assert same_microbatches(ranks[rank].microbatches, microbatches[rank])


def test_the_doors_give_the_slices_of_runs_of_ranks(tmp_path: Path) -> None:
    job = with_runs(write_job(tmp_path))
    planner, reader = opened(job, dp=2, cp=2)
    plan, _ = planner.step(planner.start())
    for rank, loaded in enumerate(run_job(job, Topology(dp=2, cp=2), steps=1)):
        role, read = Role(stage="only", cp_rank=rank % 2), loader_do_plan(plan, reader, rank // 2)
        found = constructor_do_plan(plan, read, role, part=planner.part, cp=2).microbatches()
        assert same_microbatches(loaded.microbatches, found)
        assert [one.cp_ranks for one in found] == [one.cp_ranks for one in loaded.microbatches]
    reader.close()


def test_rows_of_a_random_map_are_those_of_the_epoch_in_which_they_were_drawn(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", ["a" * count for count in range(3, 12)])
    recipe = recipe_of_map(f"{write_functions(tmp_path)}:drawn", tokenizer=None)
    catalog, part = index_recipe(recipe, tmp_path), part_of(recipe, "train")
    planner = open_planner(part, catalog)
    reader = Reader(catalog, tmp_path, cache_bytes=1 << 20, maps=maps_of(recipe.sources), seed=recipe.seed)
    cursor, epochs = planner.start(), set()
    for _ in range(6):
        plan, cursor = planner.step(cursor)
        read = loader_do_plan(plan, reader, 0)
        asked, length = read.pieces, plan.capacity_tokens // plan.num_samples
        columns = (asked.row, asked.epoch, asked.start, asked.tokens, asked.places(length))
        for row, epoch, start, tokens, place in zip(*(column.tolist() for column in columns), strict=True):
            key = hash_columns(named_key(recipe.seed, "map", "web"), np.array([row]), np.array([epoch]))[0]
            ids = np.random.Generator(np.random.Philox(key=int(key))).integers(0, 1000, row + 3)
            np.testing.assert_array_equal(read.values[place : place + tokens], ids[start : start + tokens])
            epochs.add(epoch)
    reader.close()
    assert len(epochs) > 2


def test_a_strategy_of_ones_own_defers_and_places_as_it_likes(job: Path) -> None:
    planner, reader = opened(job, dp=2)
    summary = summary_buffer(planner, planner.start())
    sample = summary.columns["sample"].copy()
    longest = int(summary.columns["tokens"].argmax())
    sample[longest] = DEFERRED
    rank = np.arange(8) // 4
    plan = plan_raw(summary, sample, {"backbone": placement_of(rank, np.arange(8) % 4)})
    assert plan.num_samples == 8 and len(plan.pieces) == int((sample != DEFERRED).sum())
    after = cursor_after(summary, plan, sample)
    assert summary.columns["row"][longest] in after.pool.row
    other = sample.copy()
    other[int(summary.columns["tokens"].argmin())] = DEFERRED
    with pytest.raises(PlanError, match=r"sample_of_piece places \d+ pieces otherwise than the plan"):
        cursor_after(summary, plan, other)
    following = summary_buffer(planner, after)
    keys = ("source", "row", "start")
    rows = set(zip(*(following.columns[key].tolist() for key in keys), strict=True))
    assert tuple(summary.columns[key][longest].item() for key in keys) in rows, "it comes in the next step"
    tensors = constructor_do_plan(plan, loader_do_plan(plan, reader, 1), ONLY, part=planner.part)
    assert tensors.num_microbatches == 4
    with pytest.raises(TopologyError, match="there is no consumer 2"):
        loader_do_plan(plan, reader, 2)
    reader.close()


def test_what_breaks_a_rule_is_named(job: Path) -> None:
    planner, reader = opened(job, dp=2)
    reader.close()
    summary = summary_buffer(planner, planner.start())
    sample = summary.columns["sample"]
    fine = placement_of(np.arange(8) % 2, np.arange(8) // 2)

    def moved(column: str, at: int, value: int) -> Any:
        values = getattr(fine, column).copy()
        values[at] = value
        return replace(fine, **{column: values})

    faults: list[tuple[Callable[[], object], str]] = [
        (lambda: plan_raw(summary, sample[1:], {"backbone": fine}), "sample_of_piece is int64"),
        (lambda: plan_raw(summary, sample * 0.5, {"backbone": fine}), "sample_of_piece is float64"),
        (lambda: plan_raw(summary, sample + 8, {"backbone": fine}), "samples are 0 to 7"),
        (lambda: plan_raw(summary, sample * 0, {"backbone": fine}), "sample 0 holds more than 64 tokens with piece"),
        (lambda: plan_raw(summary, sample, {}), "placements lack 'backbone'"),
        (lambda: plan_raw(summary, sample, {"backbone": fine, "vision": fine}), "module vision needs an ItemPlan"),
        (lambda: plan_raw(summary, sample, {"backbone": moved("dp_rank_of_sample", 3, 2)}), "sample 3 has rank 2"),
        (
            lambda: plan_raw(summary, sample, {"backbone": moved("microbatch_of_sample", 3, 4)}),
            "sample 3 has microbatch 4",
        ),
        (
            lambda: plan_raw(summary, sample, {"backbone": moved("dp_rank_of_sample", 3, 0)}),
            "has 2 samples; each has 1",
        ),
        (lambda: plan_raw(summary, sample, {"backbone": moved("slot_of_sample", 3, 1)}), "sample 3 has slot 1"),
    ]
    for call, message in faults:
        with pytest.raises(PlanError, match=message):
            call()
