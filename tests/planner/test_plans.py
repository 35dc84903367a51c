"""torchmix.index and torchmix.plan: what a program gets without the command line."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import pytest

import torchmix
from tests.support.loaders import run_job, write_job
from torchmix.parallel.topology import Topology


def test_an_index_and_plans_are_those_of_the_loader(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    shutil.rmtree(tmp_path / "catalog")
    with pytest.raises(torchmix.CatalogMissing):
        torchmix.plan(recipe, steps=1)
    catalog = torchmix.index(recipe)
    assert sorted(catalog.sources) == ["prose", "tiny", "web"]
    digests = run_job(recipe, Topology(), steps=5)[0].digests
    plans = list(torchmix.plan(recipe, steps=5))
    assert [plan.order_digest.hex() for plan in plans] == digests
    later = list(torchmix.plan(str(recipe), steps=2, start_step=3, dp=2, micro_batch_size=2))
    assert [plan.order_digest.hex() for plan in later] == digests[3:]
    assert [plan.num_microbatches for plan in later] == [2, 2]
    mapping = torchmix.load_recipe(recipe)
    forever = torchmix.plan(mapping, directory=tmp_path)
    assert [plan.step for plan in islice(forever, 7)] == list(range(7))


def test_a_single_pass_ends_and_wrong_options_are_named(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    plans = list(torchmix.plan(recipe, one_pass=True))
    given = sum(int(plan.delivered_tokens.sum()) for plan in plans)
    assert given == sum(source.num_tokens for source in torchmix.index(recipe).sources.values())
    for options, words in (
        ({"steps": -1}, "plan: steps=-1"),
        ({"start_step": 1.5}, "plan: start_step=1.5"),
        ({"cp": 0}, "plan: cp=0 must be an int of at least 1"),
        ({"part": "training"}, "'training' is no part of a recipe .did you mean 'train'"),
    ):
        with pytest.raises(torchmix.OptionError, match=words):
            torchmix.plan(recipe, **options)
    with pytest.raises(torchmix.OptionError, match="index: recipe=7 must be the path"):
        torchmix.index(7)  # type: ignore[arg-type]


def test_ranks_of_a_replica_decide_where_items_are_computed(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, extra="modules: {encoder: {sources: [web], axis: WORLD}}\n")
    sizes = {"dp": 2, "tp": 2, "pp": 2, "micro_batch_size": 2}
    planned = next(torchmix.plan(recipe, steps=1, **sizes))
    [plain] = torchmix.plan(recipe, steps=1, dp=2, micro_batch_size=2)
    assert planned.order_digest == plain.order_digest and planned.plan_digest != plain.plan_digest
    assert (planned.item_modules["encoder"].num_consumers, plain.item_modules["encoder"].num_consumers) == (8, 2)
