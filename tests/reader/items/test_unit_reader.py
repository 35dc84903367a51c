"""Units that a loader gives of items: whole or in parts, of several clients in turn, decoded once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.media import write_media_project
from tests.support.sounds import SOUND
from torchmix.indexing.scan import index_recipe
from torchmix.reader import items
from torchmix.reader.items import UnitReader, bytes_of_items, unit_catalog
from torchmix.reader.protocol import WantedPieces
from torchmix.recipe.load import load_recipe


def part(row: int, start: int, count: int) -> WantedPieces:
    return WantedPieces.end_to_end(
        source=0, row=np.array([row]), epoch=0, start=np.array([start]), tokens=np.array([count])
    )


def test_items_that_are_asked_for_in_parts_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_media_project(tmp_path, SOUND, ["lists"], length=1024, rows=6)
    catalog = index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    [sizes] = [source.sizes.tokens for source in unit_catalog(catalog, tmp_path).sources.values()]
    monkeypatch.setattr(items, "KEPT_BYTES", 1)
    with closing(UnitReader(catalog, tmp_path, masked=(), cache_bytes=1 << 20)) as reader:
        whole = [reader.read(part(row, 0, int(sizes[row]))).values for row in (0, 1, 2)]
        assert reader.stats()["items_decoded"] == 3
        cuts = {row: [0, int(sizes[row]) // 3, int(sizes[row]) // 2, int(sizes[row])] for row in (0, 1)}
        found: dict[int, list[np.ndarray]] = {0: [], 1: []}
        for number in range(3):
            for row, cut in cuts.items():  # two clients in turn
                found[row].append(reader.read(part(row, cut[number], cut[number + 1] - cut[number])).values)
        for row in found:
            assert np.array_equal(np.concatenate(found[row]), whole[row])
        assert reader.stats()["items_decoded"] == 3 + 2
        reader.read(part(2, 0, int(sizes[2])))
        reader.read(part(0, 0, 1))
        assert reader.stats()["items_decoded"] == 3 + 2 + 2, "what was given to its end makes room"
        monkeypatch.setattr(items, "BEGUN_BYTES", 1)
        reader.read(part(1, 0, 1))
        reader.read(part(0, 1, 1))
        assert reader.stats()["items_decoded"] == 3 + 2 + 2 + 2, "as do those that are begun, where they are too many"
    with closing(UnitReader(catalog, tmp_path, masked=(), cache_bytes=1 << 20, keeps=False)) as reader:
        for count in (1, 2):
            assert np.array_equal(reader.read(part(0, 0, int(sizes[0]))).values, whole[0])
            assert reader.stats()["items_decoded"] == count, "nothing is kept"
        assert reader.stats()["item_bytes_at_once"] == sizes[0]


def test_what_is_kept_is_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_media_project(tmp_path, SOUND, ["lists"], length=1024, rows=6)
    catalog = index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    [sizes] = [source.sizes.tokens for source in unit_catalog(catalog, tmp_path).sources.values()]
    files, units = bytes_of_items(catalog.sources["lists"], "sound")
    for most in (1 << 30, units // 2):
        monkeypatch.setattr(items, "KEPT_BYTES", most)
        with closing(UnitReader(catalog, tmp_path, masked=(), cache_bytes=1 << 20)) as reader:
            for row in range(len(sizes)):
                reader.read(part(row, 0, int(sizes[row])))
            held = sum(values.nbytes for values in reader._kept.values())
            assert held == units if most > units else most // 2 < held <= most
            assert files <= reader._items._reader.stats()["cache_bytes"] < files + 1024, (
                "pages of items, and their rows"
            )
