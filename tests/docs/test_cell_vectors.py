"""Cells and hold-outs against the vectors of docs/vectors.json: the code, and the second implementation."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import book_cells
from tests.support.selections import make_selected
from torchmix.recipe.fit import fit_cells

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("vector", VECTORS["cells"])
def test_cells_have_the_shares_of_the_vectors(vector: dict[str, Any]) -> None:
    names = sorted(vector["shares"])
    shares = [{value: Fraction(share) for value, share in vector["shares"][name].items()} for name in names]
    tokens = {tuple(place): n for *place, n in vector["tokens"]}
    wanted = {tuple(place): int(p) for *place, p in vector["places"]}
    assert book_cells.fit(tokens, shares) == wanted
    whole = sum(wanted.values())
    assert fit_cells(tokens, names, shares).shares == {place: Fraction(p, whole) for place, p in wanted.items()}


def test_rows_are_held_out_by_the_hashes_of_the_vectors(tmp_path: Path) -> None:
    rows = VECTORS["held_out"]["rows"]
    texts = [row["text"] for row in rows]
    for row in rows:
        assert f"{book_cells.row_hash(row['text']):016x}" == row["hash"]
        part = book_cells.part_of_row(row["text"], validation=Fraction(1, 10), test=Fraction(1, 4))
        assert part == row["part"]
    assert {row["part"] for row in rows} == {"train", "validation", "test"}
    pq.write_table(pa.table({"ids": [[1, 2]] * len(texts), "url": texts}), tmp_path / "web.parquet")
    held = {"validation": {"web": "10%"}, "test": {"web": "25%"}}
    selected = make_selected(tmp_path, {"web": {"path": "web.parquet", "id": "url"}}, ["web"], hold_out=held)
    selected.index()
    for part in ("train", "validation", "test"):
        kept = np.asarray(selected.open(part).views["web"].kept).tolist()
        assert kept == [number for number, row in enumerate(rows) if row["part"] == part], part
