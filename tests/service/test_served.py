"""What a loader keeps of documents that it was asked for in part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.recipes import make_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.recipe.parts import part_of
from torchmix.service import served
from torchmix.service.main import parts_to_serve
from torchmix.service.served import OpenRows

TOTALS = {(0, 0): 100, (0, 1): 10, (0, 2): 100, (1, 0): 50}
Piece = tuple[int, int, int, int]
"""Source, row, start and tokens."""


def after(opened: OpenRows, *pieces: Piece) -> list[tuple[int, int]]:
    """Documents that are open after a request for pieces: source and row."""
    source, row, start, tokens = np.array(pieces, np.int64).reshape(-1, 4).T
    wanted = WantedPieces.end_to_end(source=source, row=row, epoch=0, start=start, tokens=tokens)
    totals = np.array([TOTALS[piece[:2]] for piece in pieces], np.int64)
    return list(zip(*(column.tolist() for column in opened.follow(wanted, totals)), strict=True))


def test_a_document_is_open_until_all_of_it_was_asked_for() -> None:
    opened = OpenRows(1000)
    # A piece that goes on is asked for with its successor, which is the first token of the next one.
    assert after(opened, (0, 0, 0, 41), (0, 1, 0, 10)) == [(0, 0)]
    assert after(opened, (1, 0, 0, 50)) == [(0, 0)]
    assert after(opened, (0, 0, 81, 19)) == [(0, 0)]
    assert after(opened, (0, 0, 40, 41)) == [(0, 0)]
    assert after(opened, (0, 0, 80, 2)) == []


def test_documents_asked_last_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(served, "MOST_OPEN", 2)
    opened = OpenRows(1000)
    after(opened, (0, 0, 0, 11))
    after(opened, (0, 2, 0, 11))
    after(opened, (0, 0, 10, 11))
    assert after(opened, (1, 0, 0, 11)) == [(0, 0), (1, 0)]


def test_open_documents_have_a_bound_of_tokens() -> None:
    opened = OpenRows(150)
    assert after(opened, (0, 0, 0, 11), (1, 0, 0, 11)) == [(0, 0), (1, 0)]
    assert after(opened, (0, 2, 0, 11)) == [(1, 0), (0, 2)]
    assert after(OpenRows(1), (0, 0, 0, 11), (0, 2, 0, 11)) == [(0, 2)], "one is kept, however long it is"


def test_every_other_token_of_a_row_is_one_document() -> None:
    opened = OpenRows(1000)
    for _ in range(10):
        assert after(opened, *[(0, 0, 2 * k, 0) for k in range(50)]) == []
        assert after(opened, *[(0, 2, 2 * k, 2) for k in range(49)]) == [(0, 2)]
        assert after(opened, *[(0, 2, 2 * k, 2) for k in range(49)], (0, 2, 98, 2)) == []


@pytest.mark.parametrize(
    ("own", "is_cut"),
    [({}, False), ({"overflow": "split"}, True), ({"method": "concat"}, True), ({"max_length": 8}, False)],
)
def test_documents_come_in_pieces_where_a_source_says_so(own: dict[str, Any], is_cut: bool) -> None:
    recipe = make_recipe({"a": "50%", "b": "50%"}, packing={"overflow": "drop"}, sources={"a": {"packing": own}})
    parts = {"train": part_of(recipe, "train")}
    catalog: Any = SimpleNamespace(sources={})
    assert parts_to_serve(parts, lambda _: catalog, Path())["train"].is_cut is is_cut
