"""A kind of items that tests add passes index, check, plan, readers, balance over all ranks and resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import torchmix
from tests.support.image_world import steps_of_ranks
from tests.support.toy_modality.kind import HOME, NUMBER, ROW_OF_RECIPE, write_start_up
from torchmix.cli.main import main
from torchmix.errors import CatalogStale, RecipeError
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.table import KINDS
from torchmix.parallel.topology import Topology
from torchmix.recipe.items import KINDS as RECIPE_KINDS
from torchmix.recipe.load import load_recipe

TOKEN, STEPS = 300, 3


@pytest.fixture(autouse=True)
def _with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPE_KINDS, "number", ROW_OF_RECIPE)
    monkeypatch.setitem(KINDS, "number", HOME)


def write_project(folder: Path, **keys: Any) -> list[list[int]]:
    """A recipe of 200 rows; returns the numbers of each item, in the order of the catalog."""
    rng = np.random.default_rng(5)
    items, rows, texts = [], [], []
    for row in range(200):
        mine = [rng.integers(0, 1 << 20, int(rng.integers(1, 9))).tolist() for _ in range(int(rng.integers(0, 3)))]
        items += mine
        rows.append([np.array(numbers, NUMBER).tobytes() for numbers in mine])
        texts.append("<n>".join(f"row {row}" for _ in range(len(mine) + 1)))
    pq.write_table(pa.table({"text": texts, "numbers": pa.array(rows, pa.list_(pa.binary()))}), folder / "0.parquet")
    source = {"path": "0.parquet", "text": "text", "tokenizer": "bytes"}
    told = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": 4, "length": 128},
        "sources": {"toy": source | {"items": {"number": {"column": "numbers", "token": TOKEN, "per_token": 2}}}},
        "mixture": {"toy": 1},
        "modules": {"counter": {"items": "number", "sizes": "values"} | keys},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return items


def units_of(step: list[Any]) -> Iterator[tuple[int, list[int]]]:
    """Number of each item of a rank's step, and its values."""
    batch = step[0].modules["counter"]
    stops = [0, *batch.units.cumsum(0).tolist()]
    halves = [count // 2 if count % 2 == 0 else count for count in batch.units.tolist() for _ in range(2 - count % 2)]
    assert batch.cu_seqlens.diff().tolist() == halves
    for place, number in enumerate(batch.arrays["number"].tolist()):
        assert batch.arrays["many"][place].tolist() == [stops[place + 1] - stops[place]] * 2
        yield number, batch.arrays["value"][stops[place] : stops[place + 1], 0].tolist()


@pytest.mark.slow
def test_index_check_and_plan_know_the_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = write_project(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    assert main(["index", str(recipe)]) == 0
    table = index_recipe(load_recipe(recipe), tmp_path).sources["toy"].sizes.items["number"]
    assert np.asarray(table.sizes["count"]).tolist() == [len(numbers) for numbers in items]
    assert np.asarray(table.tokens).tolist() == [-(-len(numbers) // 2) for numbers in items]
    assert main(["check", str(recipe)]) in (0, 1)
    assert main(["plan", str(recipe), "--steps", "2"]) == 0
    page = tmp_path / "page.html"
    assert main(["show", str(recipe), "--step", "0", "--html", str(page)]) == 0
    assert any(", ".join(map(str, numbers)) in page.read_text(encoding="utf-8") for numbers in items)
    capsys.readouterr()


def test_options_are_checked_and_an_unknown_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path)
    told = yaml.safe_load((tmp_path / "recipe.yaml").read_text(encoding="utf-8"))
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    for key, value, message in (
        ("per_token", 0, "sources.toy.items.number.per_token"),
        ("pre_token", 1, "did you mean"),
        ("marker", "", "is empty; write a text"),
    ):
        options = told["sources"]["toy"]["items"]["number"]
        held = options.get(key)
        options[key] = value
        (tmp_path / "bad.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
        with pytest.raises(RecipeError, match=message):
            load_recipe(tmp_path / "bad.yaml")
        options.pop(key)
        if held is not None:
            options[key] = held
    recipe = load_recipe(tmp_path / "recipe.yaml")
    monkeypatch.delitem(KINDS, "number")
    with pytest.raises(CatalogStale, match="kind 'number'"):
        index_recipe(recipe, tmp_path)
    monkeypatch.delitem(RECIPE_KINDS, "number")
    with pytest.raises(RecipeError, match="'number' is no kind of items"):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.system
@pytest.mark.parametrize(
    ("place", "loaders"), [("rank", "in_process"), ("worker", "node"), ("rank", "node"), ("loader", "job,processes=2")]
)
def test_items_come_over_all_ranks_and_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, loaders: str
) -> None:
    items = write_project(tmp_path, decode_at=place)
    paths = [str(write_start_up(tmp_path / "start_up")), str(Path(__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    ranks = steps_of_ranks(tmp_path / "recipe.yaml", Topology(dp=2), STEPS, loaders=loaders)
    count = 0
    for number in range(STEPS):
        shares = [dict(units_of(steps[number])) for steps in ranks]
        assert all(items[item] == values for share in shares for item, values in share.items())
        assert not shares[0].keys() & shares[1].keys(), "an item is encoded once"
        count += sum(map(len, shares))
        tokens = np.concatenate([each.tokens.numpy().ravel() for steps in ranks for each in steps[number]])
        sent = sum(-(-len(values) // 2) for share in shares for values in share.values())
        assert int((tokens == TOKEN).sum()) == sent, "each token of an item has a row of the module"
    assert count


def test_a_run_resumes_with_the_same_items(tmp_path: Path) -> None:
    write_project(tmp_path)
    recipe = load_recipe(tmp_path / "recipe.yaml")

    def open_loader() -> Any:
        return torchmix.build_loader(
            recipe, directory=tmp_path, topology=Topology.single(), loaders="in_process", max_steps=STEPS
        )

    with open_loader() as loader:
        whole = []
        for microbatch in loader:
            whole.append(list(units_of([microbatch])))
            if len(whole) == 1:
                state = loader.state_dict()
    with open_loader() as loader:
        loader.load_state_dict(state)
        assert [list(units_of([microbatch])) for microbatch in loader] == whole[1:]
