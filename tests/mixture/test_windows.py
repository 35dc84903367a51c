"""Windows made together are those that each source makes alone."""

from __future__ import annotations

import numpy as np
import pytest

from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture import windows
from torchmix.mixture.keys import named_key
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.permutation import permute, permute_domains
from torchmix.mixture.windows import SMALL_PAGES, SMALL_ROWS, make_windows


def order_of(number: int, *, num_pages: int, window_pages: int, most_rows: int = 9, **choices) -> SourceOrder:
    """A source of pages of 0 to `most_rows` rows, the last of them at least one."""
    rng = np.random.default_rng(number)
    rows = rng.integers(0, most_rows, num_pages)
    rows[-1] += 1
    sizes = SourceSizes(
        first_row_of_page=np.concatenate([[0], np.cumsum(rows)]),
        tokens=rng.integers(0, 50, int(rows.sum())).astype(np.int32),
        window_pages=window_pages,
    )
    return SourceOrder(f"s{number}", sizes, seed=11, **choices)


def halved(tokens: np.ndarray) -> np.ndarray:
    return (tokens // 2).astype(np.int32)


def sources() -> list[SourceOrder]:
    orders = [order_of(n, num_pages=n, window_pages=256) for n in [*range(1, 40), 63, 64, 65, 255, 256, 300, 512]]
    orders += [order_of(100 + n, num_pages=n, window_pages=7) for n in range(7, 90, 9)]
    orders.append(order_of(200, num_pages=30, window_pages=8, counted=halved))
    orders.append(order_of(201, num_pages=30, window_pages=8, rows=(5, 70)))
    orders.append(order_of(202, num_pages=90, window_pages=8, rows=(5, 9)))
    orders.append(order_of(203, num_pages=SMALL_PAGES + 1, window_pages=8))
    orders.append(order_of(204, num_pages=20, window_pages=256, most_rows=SMALL_ROWS))
    orders.append(order_of(205, num_pages=20, window_pages=256, method="row"))
    orders.append(order_of(206, num_pages=20, window_pages=256, method="none"))
    return orders


@pytest.mark.parametrize(("batch_rows", "left_alone"), [(windows.BATCH_ROWS, 5), (300, 21)])
def test_they_are_the_ones_that_each_source_makes_alone(monkeypatch, batch_rows, left_alone):
    monkeypatch.setattr(windows, "BATCH_ROWS", batch_rows)
    together, alone = sources(), sources()
    for epoch in (0, 3):
        places = [(order, epoch, order.num_windows - 1) for order in together]
        make_windows(places)
        made = [order for order, _, window in places if order.has(epoch, window)]
        # All but the sparse one, the two large ones and the other methods; or those that are a batch of their own, too.
        assert len(made) == len(places) - left_alone
        for (order, _, window), lone in zip(places, alone, strict=True):
            found, expected = order.window(epoch, window), lone.window(epoch, window)
            assert np.array_equal(found.rows, expected.rows), order.name
            assert np.array_equal(found.ends, expected.ends)
            assert found.rows.dtype == expected.rows.dtype and found.ends.dtype == expected.ends.dtype
            if expected.document_tokens is None:
                assert found.document_tokens is None
            else:
                assert np.array_equal(found.document_tokens, expected.document_tokens)


def test_a_window_that_a_source_has_is_not_made_again():
    orders = sources()[:3]
    kept = orders[1].window(0, 0)
    make_windows([(order, 0, 0) for order in orders])
    assert orders[1].window(0, 0) is kept
    assert orders[0].has(0, 0) and orders[2].has(0, 0)


def test_windows_are_no_views_of_a_batch():
    orders = sources()[:9]
    make_windows([(order, 0, 0) for order in orders])
    assert all(order.window(0, 0).rows.base is None for order in orders)


def test_no_sources_or_one_are_left_to_themselves():
    make_windows([])
    [order] = sources()[:1]
    make_windows([(order, 0, 0)])
    assert not order.has(0, 0)


def test_permutations_of_many_domains_are_those_of_each():
    sizes = [*range(1, 130), 255, 256, 257, 1000, 1, 5, 5]
    keys = [named_key(3, number) for number in range(len(sizes))]
    for n, key, found in zip(sizes, keys, permute_domains(sizes, keys), strict=True):
        assert found.dtype == np.int64
        assert np.array_equal(found, permute(np.arange(n), n, key)), n
