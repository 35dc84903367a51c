"""The sum of what reading takes, and the error where it is too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.catalogs import open_catalog
from tests.support.files import make_text_file, random_texts
from tests.support.loaders import Rank, run_job, write_job
from tests.support.maps import write_functions
from tests.support.media import write_media_project
from tests.support.sounds import SOUND
from torchmix.errors import RecipeError
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.reader.items import KEPT_BYTES, bytes_of_items, decode_threads, most_item_bytes
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Loaders
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.steps import memory_budget as memory_budget_module
from torchmix.steps.memory_budget import STEP_TOKEN_BYTES, MemoryBudget, memory_budget, samples_of_leaders
from torchmix.steps.replica_steps import StreamOptions


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def budget_of(job: Path, *, num_leaders: int = 1, look_ahead: int = 2, **loaders: Any) -> MemoryBudget:
    recipe = load_recipe(job)
    return memory_budget(
        part_of(recipe, "train"),
        open_catalog(recipe, job.parent),
        recipe.read,
        Loaders(**loaders),
        samples_here=8,
        num_leaders=num_leaders,
        options=StreamOptions(look_ahead=look_ahead),
    )


def test_a_node_has_one_cache_and_one_process_whatever_leaders_it_has(job: Path) -> None:
    one, eight = budget_of(job), budget_of(job, num_leaders=8)
    assert one == eight
    assert eight.sum_bytes == sum(eight.terms.values())


def test_leaders_that_read_themselves_have_a_cache_each_and_no_process(job: Path) -> None:
    one, eight = (budget_of(job, where="in_process", num_leaders=number) for number in (1, 8))
    assert eight.terms["read.cache"] == 8 * one.terms["read.cache"]
    assert "processes" not in one.terms


def test_loaders_of_a_job_share_a_cache_and_have_the_rest_each(job: Path) -> None:
    one, job_of_three = budget_of(job), budget_of(job, where="job", processes=3)
    assert job_of_three.terms["read.cache"] == one.terms["read.cache"]
    assert job_of_three.terms["processes"] == 4 * one.terms["processes"]
    assert job_of_three.terms["orders of windows"] == 3 * one.terms["orders of windows"]


def test_spares_and_steps_count(job: Path) -> None:
    few, many = budget_of(job), budget_of(job, spares=2, look_ahead=6)
    assert many.terms["processes"] == 3 * few.terms["processes"]
    assert 6 * many.terms["steps"] == 14 * few.terms["steps"]


def test_a_cache_counts_as_much_as_there_is_to_keep(job: Path) -> None:
    small = budget_of(job).terms["read.cache"]
    assert small < 2**22, "of these files, not the gibibyte that the cache may have"


HEAVY = """
def heavy(columns, *, row, epoch, seed):
    texts = columns["text"].to_pylist()
    return {
        "tokens": pa.array([[ord(letter) for letter in text] for text in texts], pa.list_(pa.int64())),
        "picture": pa.array([[7] * 3000 for _ in texts], pa.list_(pa.uint16())),
        "weights": pa.array([[0.5] * len(text) for text in texts], pa.list_(pa.float32())),
    }

heavy.version = 1
"""


def test_lists_beside_ids_count_as_much_as_steps_have_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_text_file(tmp_path / "web.parquet", [*random_texts(8, 200, mean_words=12), "ab" * 500])
    recipe = tmp_path / "recipe.yaml"
    source = f'{{path: web.parquet, text: text, map: "{write_functions(tmp_path, HEAVY)}:heavy"}}'
    recipe.write_text(
        f"version: 1\nseed: 5\nbatch: {{samples: 8, length: 64}}\nsources: {{web: {source}}}\nmixture: {{web: 1}}\n"
    )
    found: list[int] = []

    def program(loader: StatefulDataLoader, _: Rank) -> None:
        of_step = 0
        for microbatch in loader:
            of_step += sum(
                part.nbytes for one in microbatch.rows.values() for part in (one.values, one.lengths, one.places)
            )
            if microbatch.is_last_of_step:
                found.append(of_step)
                of_step = 0

    run_job(recipe, Topology(), program=program, one_pass=True)
    monkeypatch.setattr(memory_budget_module, "BLOCK_COPIES", 0)
    counted = budget_of(recipe, look_ahead=2).terms["lists beside ids"] / 6
    assert len(found) > 5 and 8 * 12_000 < max(found) <= counted, "of each of six steps that may wait"


@pytest.mark.parametrize("place", ["rank", "worker", "loader"])
def test_units_and_files_of_items_count_where_they_wait(tmp_path: Path, place: str) -> None:
    write_media_project(tmp_path, SOUND, ["lists"], length=1000, rows=4, decode_at=place)
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    terms = budget_of(tmp_path / "recipe.yaml", where="job", processes=2).terms
    source = open_catalog(load_recipe(tmp_path / "recipe.yaml"), tmp_path).sources["lists"]
    files, units = (-(-each * 8 * 1000 // source.num_tokens) for each in bytes_of_items(source, "sound"))
    assert terms["items of steps"] == 6 * (files if place == "rank" else units)
    assert terms.get("items at ranks", 0) == (4 * units if place == "rank" else 0)
    largest = most_item_bytes(source, "sound")
    assert terms["decoding"] == (2 * KEPT_BYTES if place == "loader" else decode_threads() * largest)
    assert terms["steps"] == 6 * STEP_TOKEN_BYTES * 8 * 1000, "not of a block"


def test_a_budget_that_cannot_hold_is_added_up(job: Path) -> None:
    with pytest.raises(RecipeError, match=r"loaders\.memory: .*processes 96\.0 MiB \+ read\.cache .* = .*is 50\.0 MiB"):
        budget_of(job, memory="50MiB").check()
    budget_of(job, memory="1GiB").check()


def test_the_job_s_own_limit_counts_where_none_is_given(job: Path) -> None:
    budget = budget_of(job)
    assert not budget.is_given
    assert budget.limit_bytes > budget.sum_bytes


def test_a_loader_says_so_before_it_starts_anything(job: Path) -> None:
    with pytest.raises(RecipeError, match=r"loaders\.memory: reading may take processes"):
        build_loader(job, topology=Topology(), loaders="node,memory=50MiB")


def test_samples_of_the_leaders_of_a_node(job: Path) -> None:
    part = part_of(load_recipe(job), "train")
    assert samples_of_leaders(part, dp=4, num_leaders=2) == 4
    assert samples_of_leaders(part, dp=2, num_leaders=8) == 8
