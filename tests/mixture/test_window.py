"""Where a draw stops in a window, against taking pieces one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torchmix.mixture.windows import Taken, Window

SIZE = 16


def window_of(tokens: list[int], counted: list[int] | None = None) -> Window:
    """Documents of these tokens, in pieces of 16; `counted` is what they count for since some were removed."""
    pieces = [max(1, -(-each // SIZE)) for each in tokens]
    return Window(
        rows=np.arange(len(tokens)) + 100,
        ends=np.cumsum([0, *(counted or tokens)]),
        document_tokens=None if counted is None else np.array(tokens, np.int32),
        first_piece=np.cumsum([0, *pieces]) if max(pieces) > 1 else None,
        piece_tokens=SIZE,
    )


def pieces_of(tokens: list[int]) -> list[tuple[int, int, int, int]]:
    """(row, start, tokens, tokens of the document) of each piece."""
    return [
        (100 + i, start, min(SIZE, each - start), each)
        for i, each in enumerate(tokens)
        for start in range(0, max(1, each), SIZE)
    ]


def random_tokens(draw: random.Random) -> list[int]:
    longest = draw.choice([SIZE, 3 * SIZE, 40 * SIZE])
    return [draw.choice([0, draw.randint(0, longest), SIZE, 2 * SIZE]) for _ in range(draw.randint(1, 12))]


@pytest.mark.parametrize("seed", range(40))
def test_a_draw_takes_pieces_while_the_midpoint_of_the_next_is_below_what_is_owed(seed: int) -> None:
    draw = random.Random(seed)
    tokens = random_tokens(draw)
    window, pieces = window_of(tokens), pieces_of(tokens)
    assert window.num_pieces == len(pieces)
    for start in range(len(pieces)):
        for _ in range(6):
            owed = draw.randint(1, draw.choice([5, SIZE, 100 * SIZE]))
            stop, left = start, owed
            while stop < len(pieces) and left > 0 and pieces[stop][2] < 2 * left:
                left -= pieces[stop][2]
                stop += 1
            _, found, before, after = window.take(start, owed)
            assert before == sum(piece[2] for piece in pieces[:start])
            # Pieces of no tokens at a place where nothing is owed any more may wait for the next draw.
            assert after - before == owed - left
            assert found == stop or (left > 0 and not any(piece[2] for piece in pieces[stop:found]))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_and_stretches_are_the_tokens_of_the_documents(seed: int) -> None:
    draw = random.Random(seed)
    tokens = random_tokens(draw)
    window, pieces = window_of(tokens), pieces_of(tokens)
    for _ in range(20):
        start = draw.randrange(len(pieces))
        stop = draw.randint(start + 1, len(pieces))
        found = window.pieces(start, stop)
        taken = Taken(start, stop, window.tokens_before(start), window.tokens_before(stop))
        assert list(zip(*(column.tolist() for column in found), strict=True)) == pieces[start:stop]
        spans = [
            (row, first + i)
            for row, first, count, _ in zip(*(column.tolist() for column in window.stretches(taken)), strict=True)
            for i in range(count)
        ]
        assert spans == [(row, first + i) for row, first, count, _ in pieces[start:stop] for i in range(count)]
        rows = window.stretches(taken).row.tolist()
        assert rows == sorted(set(rows)), "one stretch of each document"


def test_the_open_document_is_the_one_that_the_next_piece_goes_on_with() -> None:
    window = window_of([5, 50, 0, 16])
    assert [window.open_document(piece) for piece in range(window.num_pieces + 1)] == [
        None,
        None,
        (101, 16),
        (101, 32),
        (101, 48),
        None,
        None,
        None,
    ]
    assert window_of([5, 16]).open_document(1) is None


def test_a_document_that_is_removed_while_it_is_open_ends_before_its_next_piece() -> None:
    """Removal makes a document count for nothing; its pieces keep their numbers, so no position moves."""
    whole, removed = window_of([5, 50, 20]), window_of([5, 50, 20], counted=[5, 0, 20])
    assert whole.num_pieces == removed.num_pieces == 7
    assert whole.take(2, 16).stop == 3
    taken = removed.take(2, 16)
    assert taken == (2, 6, 5, 21)
    given = removed.stretches(taken)
    assert [(r, s, t) for r, s, t in zip(given.row, given.start, given.tokens, strict=True) if t] == [(102, 0, 16)]
