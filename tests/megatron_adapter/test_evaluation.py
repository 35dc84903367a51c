"""Validation: from which step it goes on, with which recipe, and one pass again and again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.catalogs import open_catalog
from tests.support.loaders import open_job, write_job
from tests.support.worlds import run_ranks
from torchmix.constructor.fields import Microbatch
from torchmix.errors import RecipeError
from torchmix.megatron_adapter.evaluation import Passes, first_step, recipe_of_evaluation, recipe_of_set, steps_of_pass
from torchmix.parallel.topology import Topology
from torchmix.planner.planner import open_planner
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Evaluation
from torchmix.stateful.loader import StatefulDataLoader

STEPS = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), samples=4)


@pytest.mark.parametrize(("consumed", "step"), [(0, 0), (8, 2), (9, 3), (12, 3)])
def test_validation_goes_on_at_megatrons_count(consumed: int, step: int) -> None:
    assert first_step(consumed, samples=4) == step


def test_an_evaluation_has_its_own_batch_and_a_smaller_cache(recipe: Path) -> None:
    whole = load_recipe(recipe)
    part = recipe_of_evaluation(whole, samples=12, length=whole.batch.length)
    assert (part.batch.samples, part.batch.length) == (12, whole.batch.length)
    assert parse_bytes(part.read.cache, where="") == parse_bytes(whole.read.cache, where="") // 8
    assert part.sources == whole.sources


def test_validation_goes_round_sources_that_training_uses_once(tmp_path: Path) -> None:
    """The recipe has `split`, as `torchmix init --from-megatron` writes it for prefixes, or parts of its own."""
    plain = load_recipe(write_job(tmp_path, samples=4))
    once = {name: msgspec.structs.replace(source, max_epochs=1) for name, source in plain.sources.items()}
    split = msgspec.structs.replace(plain, sources=once, split=(80, 20))
    fifth = {name: msgspec.structs.replace(source, documents=("80%", "100%")) for name, source in once.items()}
    own = msgspec.structs.replace(plain, validation=Evaluation(sources=fifth, mixture=plain.mixture))
    for recipe in (split, own):
        part = part_of(recipe_of_evaluation(recipe, samples=4, length=recipe.batch.length), "validation")
        planner = open_planner(part, open_catalog(part, tmp_path))
        cursor = planner.start()
        while cursor.position.epoch.min() < 2:
            cursor = planner.skip(cursor)
        assert (
            steps_of_pass(recipe_of_evaluation(recipe, samples=4, length=recipe.batch.length), "validation", tmp_path)
            < cursor.step
        )


def test_rows_that_are_held_out_are_no_set_of_their_own(recipe: Path) -> None:
    held = msgspec.structs.replace(load_recipe(recipe), hold_out={"validation": {"web": "5%"}})
    with pytest.raises(RecipeError, match="rows that are held out, and selections, are validated together"):
        recipe_of_set(held, "web")


@pytest.mark.parametrize("topology", [Topology(), Topology(pp=2), Topology(tp=2, dp=2)])
def test_passes_repeat_and_a_rank_may_be_ahead(recipe: Path, topology: Topology) -> None:
    """Ranks take their microbatches in threads of their own, so some ask for the next pass long before others."""

    def take(loader: StatefulDataLoader) -> list[list[Microbatch]]:
        count = STEPS * loader.num_microbatches
        passes = Passes(loader, num_steps=STEPS)
        try:
            return [[next(passes) for _ in range(count)] for _ in range(4)]
        finally:
            passes.settle()
            loader.close()

    loaders = open_job(recipe, topology, max_steps=STEPS)
    for rounds in run_ranks(loaders, take, deadline_s=120):
        first = [(microbatch.step, microbatch.index) for microbatch in rounds[0]]
        assert first == sorted(first)
        assert first[-1][0] == STEPS - 1
        for again in rounds[1:]:
            assert [(microbatch.step, microbatch.index) for microbatch in again] == first
            for one, other in zip(rounds[0], again, strict=True):
                assert one.cu_seqlens.tolist() == other.cu_seqlens.tolist()
                assert (one.tokens is None) == (other.tokens is None)
                assert one.tokens is None or one.tokens.equal(other.tokens)
