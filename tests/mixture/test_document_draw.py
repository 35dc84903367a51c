"""Documents by the largest debt: against exact fractions, and the bounds that follow from the rule."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.support.sizes import synthetic_sizes
from torchmix.array_types import Int64Array
from torchmix.mixture.draw import Draw, Position, draw_documents
from torchmix.mixture.order import SourceOrder, StreamOrder

ONE = 1 << 32
LENGTH = 256
NO_END = np.full(3, 1 << 62, np.int64)


def orders_of(*, longest: int = 900, documents: int = 60) -> list[StreamOrder]:
    return [
        SourceOrder(
            name,
            synthetic_sizes(documents, shortest=0, longest=longest, rows_per_page=7, window_pages=3, salt=salt),
            seed=4,
            piece_tokens=LENGTH,
        )
        for salt, name in enumerate(("a", "b", "c"))
    ]


def shares_of(*parts: int) -> Int64Array:
    found = np.array([ONE * part // sum(parts) for part in parts], np.int64)
    found[0] += ONE - found.sum()
    return found


def pieces_of(order: StreamOrder, count: int) -> list[tuple[int, int, int, int]]:
    """The first pieces of a stream that hold tokens: epoch, row, start, tokens."""
    found: list[tuple[int, int, int, int]] = []
    epoch = 0
    while len(found) < count:
        for number in range(order.num_windows):
            window = order.window(epoch, number)
            of = window.pieces(0, window.num_pieces)
            columns = (of.row.tolist(), of.start.tolist(), of.tokens.tolist())
            found += [(epoch, *piece) for piece in zip(*columns, strict=True) if piece[2]]
        epoch += 1
    return found[:count]


def run(orders: list[StreamOrder], shares: Int64Array, counts: list[int]) -> list[Draw]:
    position, found = Position.start(len(orders)), []
    for count in counts:
        drawn = draw_documents(orders, shares, position, count, max_epochs=NO_END)
        found.append(drawn)
        position = drawn.position
    return found


@pytest.mark.parametrize("parts", [(1, 1, 1), (7, 2, 1), (1000, 1, 30), (0, 3, 5)])
def test_each_document_is_from_the_stream_with_the_largest_debt(parts: tuple[int, int, int]) -> None:
    counts = [1, 5, 40, 3, 200]
    orders, shares = orders_of(), shares_of(*parts) if parts[0] else np.array([0, ONE * 3 // 8, ONE * 5 // 8])
    drawn = run(orders, shares, counts)
    coming = [pieces_of(order, sum(counts)) for order in orders]
    debt, place = [Fraction(0)] * 3, [0, 0, 0]
    for draw, count in zip(drawn, counts, strict=True):
        expected: list[list[tuple[int, int, int, int]]] = [[], [], []]
        tokens = 0
        for _ in range(count):
            able = [s for s in range(3) if shares[s]]
            s = max(able, key=lambda s: (debt[s], -s))
            piece = coming[s][place[s]]
            place[s] += 1
            expected[s].append(piece)
            tokens += piece[3]
            for each in range(3):
                debt[each] += Fraction(int(shares[each]), ONE) * piece[3]
            debt[s] -= piece[3]
        got = draw.stretches
        assert len(got.row) == count
        for s in range(3):
            mine = np.flatnonzero(got.stream == s)
            columns = (got.epoch[mine], got.row[mine], got.start[mine], got.tokens[mine])
            assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected[s]
        stands = draw.position
        assert [int(d) + Fraction(int(r), ONE) for d, r in zip(stands.debt, stands.residue, strict=True)] == debt
        assert abs(int(draw.asked.sum()) - tokens) <= 3


def test_debts_stay_within_their_bounds_and_shares_are_met() -> None:
    orders, shares = orders_of(), shares_of(60, 39, 1)
    tokens = np.zeros(3)
    for drawn in run(orders, shares, [37] * 60):
        debt = drawn.position.debt
        assert debt.min() >= -LENGTH and debt.max() <= 3 * LENGTH
        np.add.at(tokens, drawn.stretches.stream, drawn.stretches.tokens)
    np.testing.assert_allclose(tokens / tokens.sum(), [0.6, 0.39, 0.01], atol=3 * LENGTH / tokens.sum())


def test_with_a_charge_documents_are_counted_however_long_they_are() -> None:
    orders, shares = orders_of(longest=200), shares_of(60, 30, 10)
    position, counts = Position.start(3), np.zeros(3, np.int64)
    for _ in range(20):
        drawn = draw_documents(orders, shares, position, 50, max_epochs=NO_END, charge=64)
        assert (
            drawn.asked.tolist()
            == (drawn.position.debt + 64 * np.bincount(drawn.stretches.stream, minlength=3) - position.debt).tolist()
        )
        position = drawn.position
        counts += np.bincount(drawn.stretches.stream, minlength=3)
    assert np.abs(counts - [600, 300, 100]).max() <= 1


def test_how_documents_are_asked_for_does_not_matter() -> None:
    orders, shares = orders_of(), shares_of(5, 3, 2)
    by_one, at_once = run(orders, shares, [1] * 90), run(orders, shares, [90])
    first = sorted(
        (int(s), k, *(int(getattr(draw.stretches, name)[0]) for name in ("epoch", "row", "start")))
        for k, draw in enumerate(by_one)
        for s in draw.stretches.stream
    )
    rest = at_once[0].stretches
    assert [one[0] for one in first] == rest.stream.tolist()
    assert [one[3] for one in first] == rest.row.tolist() and [one[4] for one in first] == rest.start.tolist()
    for name in ("epoch", "window", "offset", "debt", "residue"):
        assert np.array_equal(getattr(by_one[-1].position, name), getattr(at_once[0].position, name))


def test_a_stream_that_has_run_out_ends_the_draw_and_owes_nothing() -> None:
    orders, shares = orders_of(documents=12), shares_of(1, 1, 1)
    epochs = np.array([1, 5, 5])
    drawn = draw_documents(orders, shares, Position.start(3), 1000, max_epochs=epochs)
    assert drawn.ran_out == (0,)
    of_first = drawn.stretches.take(drawn.stretches.stream == 0)
    assert list(zip(of_first.row.tolist(), of_first.start.tolist(), strict=True)) == [
        (row, start) for epoch, row, start, _ in pieces_of(orders[0], len(of_first.row))
    ]
    assert len(of_first.row) == sum(epoch == 0 for epoch, *_ in pieces_of(orders[0], 200))
    at = drawn.position
    assert (int(at.epoch[0]), int(at.window[0]), int(at.offset[0]), int(at.debt[0]), int(at.residue[0])) == (
        1,
        0,
        0,
        0,
        0,
    )
    rest = draw_documents(orders, shares_of(1, 1, 0)[[2, 0, 1]], at, 5, max_epochs=epochs)
    assert 0 not in rest.stretches.stream
