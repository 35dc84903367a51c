"""What a source costs is measured on rows from all over it, by the code that loaders read with."""

from __future__ import annotations

import numpy as np

from tests.support.catalogs import make_world
from tests.support.deadlines import LONG_S
from tests.support.files import random_texts, random_tokens
from tests.support.image_sources import make_rows, write_source
from tests.support.maps import recipe_of_map, write_functions
from torchmix.indexing.scan import index_recipe
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.sources import maps_of
from torchmix.service.scale import measure as module
from torchmix.service.scale.measure import measure_source


def test_counts_are_those_of_the_rows_read(tmp_path):
    world = make_world(tmp_path, {"web": [random_tokens(1, 900)], "peps": [random_texts(2, 200)]})
    catalog = world.index()
    for name in ("web", "peps"):
        source = catalog.sources[name]
        whole = measure_source(catalog, tmp_path, name, most_tokens=1 << 40, most_s=LONG_S)
        few = measure_source(catalog, tmp_path, name, most_tokens=1)
        assert 0 < few.tokens <= whole.tokens <= source.num_tokens
        assert whole.pages == source.pages.num_pages
        assert whole.busy_ns > 0 and whole.cpu_ns > 0 and whole.read_bytes > 0
        assert whole.sent_bytes >= 2 * whole.tokens
        assert whole.window_bytes > 0
    assert whole.tokens == catalog.sources["peps"].num_tokens, "it has few pages"


def test_rows_lie_evenly_wherever_it_stops(tmp_path, monkeypatch):
    world = make_world(tmp_path, {"web": [random_tokens(1, 4000)]})
    catalog = world.index()
    asked = list[int]()
    read = Reader.read
    monkeypatch.setattr(
        Reader,
        "read",
        lambda self, pieces: (asked.extend(pieces.row.tolist()), read(self, pieces))[1],
    )
    source = catalog.sources["web"]
    measure_source(catalog, tmp_path, "web", most_tokens=source.num_tokens // 8, most_s=LONG_S)
    thirds = np.bincount(np.array(asked) * 3 // 4000, minlength=3)
    assert thirds.min() > 0 and sum(thirds) < 3000


def test_a_map_is_paid_for_and_its_sleep_takes_no_processor(tmp_path):
    more = """
import time
def slow(columns, *, row, epoch, seed):
    time.sleep(0.004 * len(row))
    return {"text": columns["text"]}
slow.version = 1
"""
    name = write_functions(tmp_path, more)
    make_world(tmp_path, {"web": [random_texts(2, 60)]})
    recipe = recipe_of_map(f"{name}:slow", path="web/*.parquet")
    catalog = index_recipe(recipe, tmp_path)
    found = measure_source(catalog, tmp_path, "web", maps=maps_of(recipe.sources), most_s=LONG_S)
    rows = 60 - catalog.sources["web"].num_empty
    assert found.busy_ns >= 4_000_000 * rows, "a loader is busy while it waits for a remote call"
    assert found.cpu_ns < found.busy_ns


def test_a_slow_source_is_measured_on_the_rows_of_a_call(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CALL_TOKENS", 500)
    world = make_world(tmp_path, {"web": [random_tokens(1, 900)]})
    catalog = world.index()
    found = measure_source(catalog, tmp_path, "web", most_s=0.0)
    assert 0 < found.tokens < 3000


def test_waiting_for_a_processor_counts_for_nothing(monkeypatch, tmp_path):
    assert module.Clocks(100, 30, 0).busy_since(module.Clocks(10, 10, 0)) == 70
    (tmp_path / "schedstat").write_text("5 1234 9\n")
    monkeypatch.setattr(module, "_SCHEDULE", tmp_path / "schedstat")
    assert module.Clocks.now().waited == 1234
    monkeypatch.setattr(module, "_SCHEDULE", tmp_path / "none")
    assert module.Clocks.now().waited == 0


def test_times_are_of_one_moment_though_others_take_the_processor_in_between(monkeypatch):
    waited = iter([10, 500, 500])
    walls = iter([100, 600])
    monkeypatch.setattr(module, "_waited_ns", lambda: next(waited))
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: next(walls))
    now = module.Clocks.now()
    assert (now.wall, now.waited) == (600, 500)


def test_images_are_measured_apart(tmp_path):
    files = [make_rows(number, 40) for number in range(2)]
    source = write_source(tmp_path, "pairs", "parquet", files, "dynamic")
    keys = {"version": 1, "seed": 1, "batch": {"samples": 2, "length": 512}}
    recipe = check_recipe({**keys, "sources": {"pairs": source}, "mixture": {"pairs": 1}})
    catalog = index_recipe(recipe, tmp_path)
    found = measure_source(catalog, tmp_path, "pairs")
    table = catalog.sources["pairs"].sizes.items["image"]
    total = int(table.first_run_of_row[-1])
    items = found.items["image"]
    assert 0 < items.items <= total and items.decode_ns > 0 and items.read_ns > 0
    if items.items == total:
        assert items.file_bytes == int(table.sizes["bytes"].sum()) and items.tokens == int(table.tokens.sum())
        assert items.source_tokens == catalog.sources["pairs"].num_tokens
    assert items.unit_bytes > items.items and found.tokens > 0
