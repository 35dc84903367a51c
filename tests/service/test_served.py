"""What a loader keeps of documents that it was asked for in part."""

from __future__ import annotations

import numpy as np

from torchmix.service import served
from torchmix.service.messages import PieceColumns
from torchmix.service.served import OpenRows

TOKENS = [np.array([100, 10, 100]), np.array([50])]
Piece = tuple[int, int, int, int]
"""Source, row, start and tokens."""


def after(opened: OpenRows, *pieces: Piece, epoch: int = 0) -> set[tuple[int, int, int]]:
    """Documents that are open after a request for pieces: source, row, and where they go on."""
    source, row, start, tokens = np.array(pieces, np.int64).reshape(-1, 4).T
    columns = PieceColumns(
        source=source.astype(np.int32), row=row, epoch=np.full(len(row), epoch), start=start, tokens=tokens
    )
    return set(zip(*(column.tolist() for column in opened.follow(columns)), strict=True))


def test_a_document_is_open_until_all_of_it_was_asked_for() -> None:
    opened = OpenRows(TOKENS)
    # A piece that goes on is asked for with its successor, which is the first token of the next one.
    assert after(opened, (0, 0, 0, 41), (0, 1, 0, 10)) == {(0, 0, 40)}
    assert after(opened, (1, 0, 0, 50)) == {(0, 0, 40)}
    assert after(opened, (0, 0, 40, 41)) == {(0, 0, 80)}
    assert after(opened, (0, 0, 80, 20)) == set()


def test_pieces_may_come_from_several_clients_in_any_order() -> None:
    opened = OpenRows(TOKENS)
    assert after(opened, (0, 2, 60, 40)) == {(0, 2, 0)}
    assert after(opened, (0, 2, 30, 31)) == {(0, 2, 0)}
    assert after(opened, (0, 2, 30, 31)) == {(0, 2, 0)}, "a request that is asked again changes nothing"
    assert after(opened, (0, 2, 0, 31)) == set()


def test_epochs_are_apart() -> None:
    opened = OpenRows(TOKENS)
    assert after(opened, (0, 0, 0, 41), epoch=0) == {(0, 0, 40)}
    assert after(opened, (0, 0, 40, 60), epoch=1) == {(0, 0, 0)}


def test_documents_asked_last_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(served, "MOST_OPEN", 2)
    opened = OpenRows(TOKENS)
    after(opened, (0, 0, 0, 11))
    after(opened, (0, 2, 0, 11))
    after(opened, (0, 0, 10, 11))
    assert after(opened, (1, 0, 0, 11)) == {(0, 0, 20), (1, 0, 10)}


def test_rows_that_do_not_exist_are_left_to_the_reader() -> None:
    assert after(OpenRows(TOKENS), (0, -5, 1, 3), (0, 99, 0, 500)) == set()
