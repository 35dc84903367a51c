"""Children of a source that is cut, and rows that are held out."""

from __future__ import annotations

import hashlib
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.selections import Selected, make_rows, make_selected, write_rows
from torchmix.errors import RecipeError


def folders(directory: Path, mixture: Any, path: Any = "papers/*/*.parquet", **keys: Any) -> Selected:
    """Files in folders a, b and c, of 100 rows each."""
    for number, name in enumerate("abc"):
        write_rows(directory / "papers" / name / "0.parquet", 100 * number, 100)
    return make_selected(directory, {"papers": {"path": path, "split_by": "dir"}}, mixture, **keys)


def test_each_folder_is_a_child(tmp_path: Path) -> None:
    world = folders(tmp_path, ["papers/a", "papers/c"])
    world.index()
    assert world.rows("papers/a") == list(range(100))
    assert world.rows("papers/c") == list(range(200, 300))
    assert all("/" not in path.name for path in (tmp_path / "catalog").rglob("*"))


def test_a_source_beside_its_children_has_the_other_rows(tmp_path: Path) -> None:
    world = folders(tmp_path, {"papers": 1, "papers/b": 2})
    world.index()
    assert world.rows("papers/b") == list(range(100, 200))
    assert world.rows("papers") == [*range(100), *range(200, 300)]
    assert world.view("papers").left == {"papers/b": 100}


def test_folders_that_do_not_exist_and_files_without_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no folder 'd'.*its folders are a, b, c") as caught:
        folders(tmp_path, ["papers/d"]).index()
    assert caught.value.where == "mixture.papers/d"
    write_rows(tmp_path / "papers" / "loose.parquet", 300, 10)
    with pytest.raises(RecipeError, match=r"papers/loose.parquet lies directly in papers; split_by: dir") as caught:
        folders(tmp_path, ["papers/a"], path=["papers/*/*.parquet", "papers/*.parquet"]).index()
    assert caught.value.where == "sources.papers.split_by"


def test_quantiles_are_children_of_equal_size_in_the_order_of_the_number(tmp_path: Path) -> None:
    write_rows(tmp_path / "g" / "0.parquet", 0, 150)
    write_rows(tmp_path / "g" / "1.parquet", 150, 53)
    names = [f"grades/q{number}" for number in range(1, 5)]
    cut = {"column": "quality", "quantiles": 4}
    world = make_selected(
        tmp_path, {"grades": {"path": "g/*.parquet", "properties": ["quality"], "split_by": cut}}, names
    )
    world.index()
    values = [one["quality"] for one in make_rows(0, 203).to_pylist()]
    expected = sorted((row for row in range(203) if values[row] is not None), key=lambda row: (values[row], row))
    found = [world.rows(name) for name in names]
    borders = [len(expected) * number // 4 for number in range(5)]
    assert found == [sorted(expected[start:stop]) for start, stop in pairwise(borders)]


def test_a_property_that_is_no_number_has_no_quantiles(tmp_path: Path) -> None:
    write_rows(tmp_path / "g" / "0.parquet", 0, 50)
    cut = {"column": "lang", "quantiles": 2}
    source = {"path": "g/*.parquet", "properties": ["lang"], "split_by": cut}
    with pytest.raises(RecipeError, match="property 'lang' is string, no number") as caught:
        make_selected(tmp_path, {"g": source}, ["g/q1"]).index()
    assert caught.value.where == "sources.g.split_by.column"


def hash_of(text: str) -> float:
    """The rule of hold-outs, in one line."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def held(directory: Path, rows: int = 600, *, source: Any = None, **keys: Any) -> Selected:
    if not (directory / "data").exists():
        write_rows(directory / "data" / "web" / "0.parquet", 0, rows // 2)
        write_rows(directory / "data" / "web" / "1.parquet", rows // 2, rows - rows // 2)
    web = source or {"path": "data/web/*.parquet", "id": "url", "properties": ["lang"]}
    german = {"from": "web", "where": "lang = 'de'"}
    hold_out = {"validation": {"web": "5%"}, "test": {"web": "10%"}}
    return make_selected(directory, {"web": web, "german": german}, {"web": 3, "german": 1}, hold_out=hold_out, **keys)


def test_held_out_rows_follow_from_the_hash_of_the_id_and_selections_inherit_them(tmp_path: Path) -> None:
    world = held(tmp_path)
    world.index()
    hashes = [hash_of(f"https://{row}.example") for row in range(600)]
    german = {row for row in range(600) if row % 4 == 0}
    for part, low, high in (("train", 0.05, 0.9), ("validation", 0.0, 0.05), ("test", 0.9, 1.0)):
        band = {row for row in range(600) if low <= hashes[row] < high}
        assert band & german and band - german
        assert world.rows("web", part) == sorted(band - german), part
        assert world.rows("german", part) == sorted(band & german), part


def test_without_an_id_the_path_and_the_row_decide_wherever_the_folder_lies(tmp_path: Path) -> None:
    source = {"path": "data/web/*.parquet", "properties": ["lang"]}
    world = held(tmp_path / "one", source=source)
    world.index()
    places = [f"{number}.parquet:{row}" for number in range(2) for row in range(300)]
    expected = [row for row, place in enumerate(places) if hash_of(place) < 0.05 and row % 4]
    assert world.rows("web", "validation") == expected
    (tmp_path / "two").mkdir()
    shutil.copytree(tmp_path / "one" / "data", tmp_path / "two" / "moved")
    moved = {"path": str(tmp_path / "two" / "moved" / "web" / "*.parquet"), "properties": ["lang"]}
    other = held(tmp_path / "two", source=moved, seed=99)
    other.index()
    assert other.rows("web", "validation") == expected
    assert other.open().fingerprint == world.open().fingerprint


def test_rows_of_added_files_join_by_the_same_rule_and_move_no_other(tmp_path: Path) -> None:
    world = held(tmp_path)
    world.index()
    before = {part: world.rows("web", part) for part in ("train", "validation", "test")}
    write_rows(tmp_path / "data" / "web" / "2.parquet", 600, 200)
    world.index()
    for part, rows in before.items():
        after = world.rows("web", part)
        assert after[: len(rows)] == rows and len(after) > len(rows)
        assert all(row >= 600 for row in after[len(rows) :])


def test_whatever_is_held_out_no_row_is_in_two_parts_and_none_is_lost(tmp_path: Path) -> None:
    world = held(tmp_path)
    world.index()
    found = [
        row for part in ("train", "validation", "test") for name in ("web", "german") for row in world.rows(name, part)
    ]
    assert sorted(found) == list(range(600))


def test_ids_must_be_there_and_be_text_or_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for ids, words in (([1, 2, None, 4], "row 2 has no 'n'"), ([0.5, 1.0, 2.0, 3.0], "'n' is double; an id is text")):
        pq.write_table(pa.table({"ids": [[1]] * 4, "n": ids}), tmp_path / "data" / "0.parquet")
        world = make_selected(
            tmp_path, {"web": {"path": "data/*.parquet", "id": "n"}}, ["web"], hold_out={"test": {"web": "50%"}}
        )
        with pytest.raises(RecipeError, match=words) as caught:
            world.index()
        assert caught.value.where == "sources.web.id"
    pq.write_table(pa.table({"ids": [[1]] * 400, "n": np.arange(400)}), tmp_path / "data" / "0.parquet")
    world.index()
    assert world.rows("web", "test") == [row for row in range(400) if hash_of(str(row)) >= 0.5]
