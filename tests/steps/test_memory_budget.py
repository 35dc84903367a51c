"""The sum of what reading takes, and the error where it is too much."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.catalogs import open_catalog
from tests.support.files import make_text_file, random_texts
from tests.support.loaders import Rank, run_job, write_job
from tests.support.maps import write_functions
from tests.support.media import write_media_project
from tests.support.sounds import SOUND
from torchmix.errors import RecipeError
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.place_tree import ClientPlaceTree, Layout
from torchmix.parallel.topology import Topology
from torchmix.reader.items import CACHE_BYTES, KEPT_BYTES, bytes_of_items, decode_threads, most_item_bytes
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Context, Loaders
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.steps import memory_budget as memory_budget_module
from torchmix.steps.memory_budget import (
    STEP_TOKEN_BYTES,
    MemoryBudget,
    budget_of_node,
    memory_budget,
    ranks_here,
    ranks_of_nodes,
    samples_of_leaders,
)
from torchmix.steps.replica_steps import StreamOptions


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def budget_of(
    job: Path,
    *,
    num_leaders: int = 1,
    look_ahead: int = 2,
    num_peers: int = 0,
    layout: Layout | None = None,
    **loaders: Any,
) -> MemoryBudget:
    recipe = load_recipe(job)
    return memory_budget(
        part_of(recipe, "train"),
        open_catalog(recipe, job.parent),
        recipe.read,
        Loaders(**loaders),
        samples_here=8,
        num_leaders=num_leaders,
        options=StreamOptions(look_ahead=look_ahead),
        num_peers=num_peers,
        layout=layout,
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


@pytest.mark.parametrize("asked", ["job", "ray", "remote"])
def test_a_node_that_reads_first_keeps_what_its_memory_leaves(job: Path, asked: str) -> None:
    words: dict[str, Any] = {"where": ("node", asked), "endpoints": "e" if asked == "remote" else None}
    whole = budget_of(job, **words)
    kept, rest = whole.terms["read.cache"], whole.sum_bytes - whole.terms["read.cache"]
    assert whole.cache_bytes == kept > 0 and whole.spills
    assert whole.terms.get("cache of loaders", 0) == (kept if asked == "job" else 0), "theirs is beside the node's"
    assert whole.terms["processes"] == budget_of(job, where=asked, endpoints=words["endpoints"]).terms["processes"]
    for left in (kept + 5, kept // 2, 0):
        found = budget_of(job, memory=rest + left, **words)
        found.check()
        assert found.cache_bytes == found.terms.get("read.cache", 0) == min(left, kept)
    with pytest.raises(RecipeError, match=r"loaders\.memory: .* Lower look_ahead or shuffle\.window_bytes"):
        budget_of(job, memory=rest - 1, **words).check()


@pytest.mark.parametrize(("place", "stores"), [("rank", 1), ("worker", 1), ("loader", 2)])
def test_a_node_that_reads_first_keeps_items_in_half_of_what_is_left(tmp_path: Path, place: str, stores: int) -> None:
    write_media_project(tmp_path, SOUND, ["lists"], length=1000, rows=4, decode_at=place)
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    words = {"where": ("node", "job"), "memory": "64GiB"}
    whole = budget_of(tmp_path / "recipe.yaml", **words)
    assert whole.item_bytes == CACHE_BYTES and whole.terms["items read here"] == stores * CACHE_BYTES
    at_loaders = budget_of(tmp_path / "recipe.yaml", where="job", memory="64GiB").terms["decoding"]
    source = open_catalog(load_recipe(tmp_path / "recipe.yaml"), tmp_path).sources["lists"]
    here = decode_threads() * most_item_bytes(source, "sound") if place == "loader" else 0
    assert whole.terms["decoding"] == at_loaders + here, "both may decode"
    rest = whole.sum_bytes - whole.terms["items read here"] - whole.terms["read.cache"]
    small = budget_of(tmp_path / "recipe.yaml", **{**words, "memory": rest + 1000})
    small.check()
    assert (small.item_bytes, small.cache_bytes) == (500 // stores, 500)


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
    assert terms["pages of items"] == bytes_of_items(source, "sound")[0]


def test_leaders_of_one_replica_have_its_texts_each_and_its_items_once(tmp_path: Path) -> None:
    write_media_project(tmp_path, SOUND, ["lists"], length=1000, rows=4)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    index_recipe(recipe, tmp_path)
    part, catalog = part_of(recipe, "train"), open_catalog(recipe, tmp_path)
    one, two = (
        budget_of_node(
            part,
            catalog,
            recipe.read,
            Loaders(),
            here=(leaders, 0),
            layout=Layout(dp=2, pp=2),
            options=StreamOptions(),
        ).terms
        for leaders in (2, 4)
    )
    assert two["steps"] == 2 * one["steps"]
    assert two["items of steps"] == one["items of steps"] > 0


def held_bytes(*records: Any) -> int:
    """Bytes of memory that the tensors and arrays in some records lie in, each byte once."""
    found: list[tuple[int, int]] = []

    def look(value: Any) -> None:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            storage = (torch.from_numpy(value) if isinstance(value, np.ndarray) else value).untyped_storage()
            found.append((storage.data_ptr(), storage.nbytes()))
        elif isinstance(value, Mapping):
            for each in value.values():
                look(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                look(each)
        elif isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                look(getattr(value, name))

    look(records)
    held = end = 0
    for start, count in sorted(found):
        held += max(0, start + count - max(start, end))
        end = max(end, start + count)
    return held


@pytest.mark.slow
def test_peers_hold_what_counts_for_them(tmp_path: Path) -> None:
    """Where TP ranks are one consumer each holds all of its units, else each its part, and none of them twice."""
    found: dict[int, tuple[int, int]] = {}

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        next(iter(loader))
        deadline = time.monotonic() + 60
        while len(loader._feed._waiting) < 3:  # and one is in use
            assert time.monotonic() < deadline
            time.sleep(0.005)
        steps = [loader._step.block, *loader._feed._waiting]
        units = [step.steps[0].modules[f"encoder.unit/{SOUND.unit_array}"].nbytes for step in steps]
        held = held_bytes([(step.fields, step.steps) for step in steps])
        found[loader._tree.topology.rank] = sum(units), held

    recipe = tmp_path / "recipe.yaml"
    write_media_project(tmp_path, SOUND, ["lists"], length=1000, rows=4, decode_at="worker", axis="DP")
    index_recipe(load_recipe(recipe), tmp_path)
    source = open_catalog(load_recipe(recipe), tmp_path).sources["lists"]
    of_step = Fraction(bytes_of_items(source, "sound")[1] * 8 * 1000, source.num_tokens)
    for axis, tp in (("DP", 2), ("WORLD", 3)):
        recipe.write_text(recipe.read_text().replace("axis: DP", f"axis: {axis}"))
        run_job(recipe, Topology(tp=tp), program=program)
        of_text = 4 * (STEP_TOKEN_BYTES * 4 * 1000 + 8192)
        for rank in range(1, tp):
            units, held = found[rank]
            assert 0 < units <= held <= units + of_text, (axis, rank)
        terms, peers = budget_of(recipe, num_peers=tp - 1, layout=Layout(tp=tp)).terms, tp - 1
        share, messages = (of_step, 1) if axis == "DP" else (of_step / tp, peers)
        assert terms["items at peers"] == math.ceil(share * (4 * peers + 2 * messages)), axis
        assert terms["steps at peers"] == STEP_TOKEN_BYTES * 8 * 1000 * (4 * peers + 2), axis
    assert "items at peers" not in budget_of(recipe).terms


def test_ranks_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ClientPlaceTree.from_topology(Topology(tp=4, dp=4, rank=4))
    assert ranks_here(tree, is_job=False) == (4, 12)
    assert ranks_here(tree, is_job=True) == (1, 3), "those that it leads, where torchrun says nothing"
    for number, (local, of_node, expected) in enumerate([(0, 4, (1, 3)), (4, 8, (2, 6)), (2, 4, (1, 3))]):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_node))
        assert ranks_here(tree, is_job=True) == expected, number
    stages = ClientPlaceTree.from_topology(Topology(tp=2, pp=4, rank=2), leaders="stage")
    unread = stages.leaders_without_text
    assert unread == (2, 4) and ranks_here(stages, is_job=False, unread=unread) == (2, 2)
    # Nodes of ranks 0 to 3, of 2 to 5, and of all with one process in reserve.
    for local, of_node, expected in ((2, 4, (1, 1)), (0, 4, (0, 0)), (2, 9, (2, 2))):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_node))
        assert ranks_here(stages, is_job=True, unread=unread) == expected


def test_a_node_of_middle_stages_keeps_no_pages(job: Path) -> None:
    terms = budget_of(job, where="in_process", num_leaders=0, num_peers=0, layout=Layout(pp=4)).terms
    assert "read.cache" not in terms and "steps at peers" not in terms and "dictionaries" not in terms


def test_ranks_of_the_nodes_of_a_job() -> None:
    layout = Layout(dp=3, tp=2, pp=2)
    assert ranks_of_nodes(layout, None) == ranks_of_nodes(layout, 99) == [(3, 9)]
    assert ranks_of_nodes(layout, 4) == [(1, 3), (2, 2)], "ranks 0, 2 and 4 lead, and the last stage is behind them"
    assert ranks_of_nodes(layout, 5) == [(3, 2)] and ranks_of_nodes(Layout(dp=5), 2) == [(1, 0), (2, 0)]


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
    assert samples_of_leaders(part, dp=2, num_leaders=8) == 32, "four of each replica hold its four samples"
    runs = msgspec.structs.replace(part, balance=msgspec.structs.replace(part.balance, context=Context(rank_tokens=64)))
    most = [samples_of_leaders(runs, dp=2, num_leaders=leaders) for leaders in (1, 2, 4)]
    assert most == [8 + 1, 8 + 1, 2 * (8 + 1)], "a replica may get all, and a document beyond it"
