"""What steps cost loaders follows the plan: shares of coming steps, ramps of the batch, streams that have run out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.catalogs import make_world
from tests.support.files import random_tokens
from tests.support.media import write_media_project
from tests.support.scaled_jobs import price
from tests.support.sounds import SOUND
from torchmix.catalog.store import open_part
from torchmix.indexing.scan import index_recipe
from torchmix.reader.items import bytes_of_items, most_item_bytes
from torchmix.recipe.build import build
from torchmix.recipe.load import check_recipe, load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe
from torchmix.service.scale.loads import ComingLoads, ItemProfile, profile_of


@pytest.fixture
def loads_of(tmp_path):
    files = {name: [random_tokens(number, 200)] for number, name in enumerate(("a", "b", "c"))}
    world = make_world(tmp_path, files)

    def make(**keys):
        whole = {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 10, "length": 1000},
            "sources": {name: {"path": f"{name}/*.parquet", "tokens": "input_ids"} for name in files},
            "mixture": {"a": "50%", "b": "30%", "c": "20%"},
            **keys,
        }
        recipe = check_recipe(build(Recipe, whole))
        index_recipe(recipe, world.directory)
        part = part_of(recipe, "train")
        catalog = open_part(world.directory / "catalog", part)
        profile = profile_of(catalog, 1, {"a": price(1), "b": price(10), "c": price(100)})
        return lambda *steps, **more: {
            load.name: load.cost for load in ComingLoads(part, catalog, profile).mean(*steps, **more)
        }

    return make


def test_cost_is_share_by_tokens_by_price(loads_of):
    assert loads_of()(3, 4) == pytest.approx({"a": 5000, "b": 30_000, "c": 200_000}, abs=1)


def test_a_schedule_is_known_before_it_comes(loads_of):
    change = {"from": "50 steps", "mixture": {"a": "90%", "b": "10%"}}
    costs = loads_of(schedule=[change])
    assert costs(49, 50)["c"] == pytest.approx(200_000, abs=1) and costs(50, 51)["c"] == 0
    assert costs(45, 55)["c"] == pytest.approx(100_000, abs=1)


def test_a_ramp_of_the_batch_is_known_before_it_comes(loads_of):
    ramp = [{"from_step": 0, "samples": 10}, {"from_step": 20, "samples": 30}]
    costs = loads_of(batch={"samples": ramp, "length": 1000})
    assert costs(20, 21)["a"] == pytest.approx(3 * costs(19, 20)["a"], abs=3)


def test_a_stream_that_has_run_out_costs_nothing_and_others_more(loads_of):
    costs = loads_of()
    gone = costs(0, 1, gone=frozenset({"c"}))
    assert gone["c"] == 0 and gone["b"] == pytest.approx(30_000 * 100 / 80, rel=1e-6)


@pytest.mark.parametrize(
    ("place", "folder", "of_items"),
    [("loader", False, 1400), ("loader", True, 1400), ("rank", False, 400), ("rank", True, 0)],
)
def test_items_cost_a_loader_what_it_does_with_them(tmp_path, place, folder, of_items):
    """For 1000 tokens of the source 6000 ns of texts, 400 to read items and 1000 to decode them."""
    container = "files" if folder else "lists"
    write_media_project(tmp_path, SOUND, [container], length=1000, rows=4, decode_at=place)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    catalog = index_recipe(recipe, tmp_path)
    part = part_of(recipe, "train")
    sound = ItemProfile(items=2, tokens=9, source_tokens=1000, read_ns=400, decode_ns=1000, file_bytes=1, unit_bytes=1)
    profile = profile_of(catalog, part.seed, {container: replace(price(6), items={"sound": sound})})
    [load] = ComingLoads(part, catalog, profile).mean(0, 1)
    assert (load.cost, load.item_cost) == (4 * (6000 + of_items), 4 * of_items), "4 samples of 1000 tokens"
    held = most_item_bytes(catalog.sources[container], "sound") if place == "loader" else 0
    assert load.state_bytes == price(6).state_bytes + held
    assert load.unit_bytes == (bytes_of_items(catalog.sources[container], "sound")[1] if place == "loader" else 0)
    assert (load.most_loaders == len(catalog.sources[container].sizes.items["sound"].tokens)) == (place == "loader")


def test_a_flat_is_shared_out_by_the_tokens_of_its_members(loads_of):
    costs = loads_of(mixture={"ab": {"share": "50%", "flat": ["a", "b"]}, "c": "50%"})(0, 1)
    assert costs["c"] == pytest.approx(500_000, abs=1)
    assert costs["a"] + costs["b"] / 10 == pytest.approx(5000, abs=3) and costs["a"] > 1000
