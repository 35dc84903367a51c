from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.sizes import synthetic_sizes
from torchmix.mixture import coming as coming_module
from torchmix.mixture.coming import KEPT, ComingPieces, Given
from torchmix.mixture.draw import Position, draw
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.shares import SHARE_ONE

NUM_SOURCES = 40


def at_most_90(tokens: Any) -> Any:
    return np.minimum(tokens, 90)


def orders_of(counted: Callable[[Any], Any] | None) -> list[SourceOrder]:
    """Sources of 30 to 400 documents, some empty; two have few used rows."""
    orders = []
    for s in range(NUM_SOURCES):
        sizes = synthetic_sizes(30 + 9 * s, shortest=0, longest=300, rows_per_page=6, window_pages=7, salt=s)
        rows = (40, 60) if s in (20, 30) else None
        orders.append(SourceOrder(f"s{s}", sizes, seed=3, counted=counted, rows=rows))
    return orders


def assert_equal(left: Any, right: Any) -> None:
    for name in left.__struct_fields__:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)


@pytest.mark.parametrize("kept", [8, KEPT])
@pytest.mark.parametrize("counted", [None, at_most_90], ids=["whole", "truncated"])
def test_draws_are_the_same_with_and_without_what_earlier_ones_have_seen(counted, kept, monkeypatch):
    monkeypatch.setattr(coming_module, "KEPT", kept)
    monkeypatch.setattr(coming_module, "_WIDTH", kept + 2)
    answered: list[int] = []
    give = ComingPieces.give

    def spied(self: ComingPieces, *asked: Any) -> Given:
        given = give(self, *asked)
        answered.append(np.count_nonzero(given.num_pieces))
        return given

    monkeypatch.setattr(ComingPieces, "give", spied)
    shares = np.arange(1, NUM_SOURCES + 1) ** 2
    shares = shares * SHARE_ONE // shares.sum()
    max_epochs = np.full(NUM_SOURCES, 1 << 40)
    max_epochs[35] = 2
    with_it, without = orders_of(counted), orders_of(counted)
    coming, position = ComingPieces(), Position.start(NUM_SOURCES)
    rng = np.random.default_rng(4)
    for _ in range(60):
        asked = int(rng.choice([3, 900, 5000, 40_000], p=[0.2, 0.4, 0.3, 0.1]))
        here = draw(with_it, shares, position, asked, max_epochs=max_epochs, coming=coming)
        there = draw(without, shares, position, asked, max_epochs=max_epochs)
        assert_equal(here.stretches, there.stretches)
        assert_equal(here.position, there.position)
        assert here.ran_out == there.ran_out
        position = here.position
    assert sum(answered) > (500 if kept == KEPT else 50), "hardly anything was answered from what is held"


def test_what_was_seen_is_forgotten_with_another_position():
    orders = orders_of(None)
    shares = np.full(NUM_SOURCES, SHARE_ONE // NUM_SOURCES)
    endless = np.full(NUM_SOURCES, 1 << 40)
    coming, start = ComingPieces(), Position.start(NUM_SOURCES)
    first = draw(orders, shares, start, 9000, max_epochs=endless, coming=coming)
    assert coming.next_tokens.any()
    again = draw(orders, shares, start, 9000, max_epochs=endless, coming=coming)
    assert_equal(first.stretches, again.stretches)
