"""Tables of further properties: joined by id, refused where keys do not fit, and never a part of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from tests.support.selections import Selected, make_selected, write_rows
from torchmix.errors import OptionError, SideTableError, SourceUnreadable
from torchmix.indexing.add_properties import add_properties

WEB = {"path": "web/*.parquet", "id": "url", "properties": ["lang"]}
TOXIC = {"from": "web", "where": "toxic > 0.5 and lang = 'de'"}


def world_of(directory: Path, mixture: Any = ("web",), **sources: Any) -> Selected:
    if not (directory / "web").exists():
        write_rows(directory / "web" / "0.parquet", 0, 60)
        write_rows(directory / "web" / "1.parquet", 60, 40)
    return make_selected(directory, {"web": WEB, **sources}, list(mixture))


def side(directory: Path, rows: list[int], name: str = "web.parquet", **columns: Any) -> Path:
    """A table of `toxic` for rows, in the order in which they are given."""
    toxic = {"toxic": [row % 3 / 2 for row in rows], **columns}
    pq.write_table(pa.table({"address": [f"https://{row}.example" for row in rows], **toxic}), directory / name)
    return directory / name


def add(world: Selected, table: Path, **options: Any) -> Any:
    return add_properties(world.recipe, world.directory, table, key="address", **options)


def test_a_joined_property_selects_and_touches_no_fingerprint(tmp_path: Path) -> None:
    plain = world_of(tmp_path)
    before = plain.index().catalog
    added = add(plain, side(tmp_path, list(range(119, -1, -1))))
    assert (added.source, added.properties, added.num_documents) == ("web", ("toxic",), 100)
    assert plain.open().fingerprint == before.fingerprint
    world = world_of(tmp_path, ["toxic"], toxic=TOXIC)
    assert world.index().scanned_files == 0
    assert world.rows("toxic") == [row for row in range(100) if row % 4 == 0 and row % 3 == 2]


def test_a_table_that_comes_again_replaces_the_one_before(tmp_path: Path) -> None:
    world = world_of(tmp_path, ["toxic"], toxic=TOXIC)
    add(world, side(tmp_path, list(range(100))))
    before = world.rows("toxic")
    add(world, side(tmp_path, list(range(100)), toxic=[float(row < 50) for row in range(100)]))
    assert world.rows("toxic") == [row for row in range(50) if row % 4 == 0] != before
    files = {path.name for path in (tmp_path / "catalog" / "properties").iterdir()}
    assert len(files) == 2 + 3, "columns of two files; the table, joined to each"


def test_files_that_come_later_are_joined_too_or_refused_with_the_missing_id(tmp_path: Path) -> None:
    world = world_of(tmp_path, ["toxic"], toxic=TOXIC)
    add(world, side(tmp_path, list(range(110))))
    write_rows(tmp_path / "web" / "2.parquet", 100, 10)
    world.index()
    assert max(world.rows("toxic")) >= 100
    manifest = world.manifest()
    write_rows(tmp_path / "web" / "3.parquet", 108, 10)
    words = r"web/3.parquet: the table of properties lacks 8 of 10 ids, as 'https://110.example' of row 2"
    with pytest.raises(SideTableError, match=words):
        world.index()
    assert world.manifest() == manifest
    add(world, side(tmp_path, list(range(120))))
    assert len(world.rows("toxic")) > 0


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*range(100), 3, 5, 5], "2 keys of 'address' stand there more than once, as 'https://3.example'"),
        (list(range(99)), r"web/1.parquet: the table of properties lacks 1 of 40 ids, as 'https://99.example'"),
    ],
)
def test_double_and_missing_keys_are_named_and_change_nothing(tmp_path: Path, rows: list[int], words: str) -> None:
    world = world_of(tmp_path)
    world.index()
    manifest = world.manifest()
    with pytest.raises(SideTableError, match=words):
        add(world, side(tmp_path, rows))
    assert world.manifest() == manifest


def test_other_faults_are_named(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    world.index()
    with pytest.raises(SideTableError, match=r"has no column 'address' .did you mean 'adress'"):
        pq.write_table(pa.table({"adress": ["a"]}), tmp_path / "web.parquet")
        add(world, tmp_path / "web.parquet")
    with pytest.raises(SideTableError, match="has property 'lang' in its files; rename"):
        add(world, side(tmp_path, list(range(100)), lang=["x"] * 100))
    with pytest.raises(SourceUnreadable, match=r"missing.parquet cannot be read"):
        add(world, tmp_path / "missing.parquet")
    with pytest.raises(SourceUnreadable, match="is no table by its name"):
        add(world, tmp_path / "web.txt")
    with pytest.raises(OptionError, match=r"no source 'wep' .did you mean 'web'"):
        add(world, side(tmp_path, list(range(100))), source="wep")
    bare = make_selected(tmp_path, {"web": {"path": "web/*.parquet"}}, ["web"])
    with pytest.raises(OptionError, match="no source has an id; write `id: COLUMN`"):
        add(bare, side(tmp_path, list(range(100))))


def test_tables_of_csv_and_the_only_source_with_an_id(tmp_path: Path) -> None:
    world = world_of(tmp_path, ["toxic"], toxic=TOXIC)
    table = pq.read_table(side(tmp_path, list(range(100))))
    pa_csv.write_csv(table, tmp_path / "scores.csv")
    assert add(world, tmp_path / "scores.csv").source == "web"
    assert world.rows("toxic")
