"""Spaces: every row of every child once, the kept ones at the positions that they have among all."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes, window_units_of_view
from torchmix.mixture.spaces import SMALL_UNIT_ROWS, FlatSpace, SourceSpace, Space, ViewSpace, windows_of_flat


def sizes_of(rng: random.Random, num_pages: int, most_rows: int = 40) -> SourceSizes:
    counts = [rng.choice([0, 1, rng.randint(1, most_rows)]) for _ in range(num_pages - 1)] + [rng.randint(1, most_rows)]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    tokens = np.array([rng.choice([0, rng.randint(1, 999)]) for _ in range(int(first[-1]))], np.int32)
    return SourceSizes(first_row_of_page=first, tokens=tokens, window_pages=max(1, num_pages // 3))


def random_space(rng: random.Random, source: int, table: dict[int, SourceSizes]) -> tuple[Space, set[tuple[int, int]]]:
    """A space of one source, and the (source, row) that it can give."""
    sizes = table[source] = sizes_of(rng, rng.choice([1, 3, 30, 200]))
    if rng.random() < 0.5:
        return SourceSpace(source, sizes), {(source, row) for row in range(sizes.num_documents)}
    kept = sorted(rng.sample(range(sizes.num_documents), max(1, sizes.num_documents // rng.choice([1, 3, 40]))))
    space = ViewSpace(source, sizes, np.array(kept, np.uint32), window_units=5)
    return space, {(source, row) for row in kept}


def all_units(space: Space) -> Int64Array:
    return np.arange(space.num_units, dtype=np.int64)


def check(space: Space, table: dict[int, SourceSizes], wanted: set[tuple[int, int]], rng: random.Random) -> None:
    members = space.members(all_units(space))
    source, row = space.places(members.rows)
    given = list(zip(source.tolist(), row.tolist(), strict=True))
    assert len(given) == len(set(given)) == space.num_kept and set(given) == wanted
    tokens = [int(table[s].tokens[r]) for s, r in given]
    assert space.tokens(members.rows).tolist() == tokens and space.num_tokens == sum(tokens)
    assert max(tokens) <= space.longest_tokens and members.num_rows == space.num_rows
    some = np.array(sorted(rng.sample(range(space.num_units), rng.randint(0, space.num_units))), np.int64)
    units, parts, before = [], [], 0
    for unit in some.tolist():  # one by one: unit after unit, positions counted on
        part = space.members(np.array([unit], np.int64))
        at = np.arange(part.num_rows) if part.positions is None else part.positions
        units += part.rows.tolist()
        parts += (at + before).tolist()
        before += part.num_rows
    together = space.members(some)
    assert together.rows.tolist() == units and together.num_rows == before
    assert (list(range(before)) if together.positions is None else together.positions.tolist()) == parts
    held = {(s, page) for s, pages in space.pages(some) for page in pages.tolist()}
    source, row = space.places(together.rows)
    for s, r in zip(source.tolist(), row.tolist(), strict=True):
        assert (s, int(np.searchsorted(table[s].first_row_of_page, r, side="right")) - 1) in held


@pytest.mark.parametrize("seed", range(25))
def test_a_flat_of_sources_views_and_flats_has_every_row_once(seed: int) -> None:
    rng = random.Random(seed)
    table: dict[int, SourceSizes] = {}
    children, wanted = [], set()
    for source in range(rng.randint(1, 6)):
        space, rows = random_space(rng, source, table)
        check(space, table, rows, rng)
        children.append(space)
        wanted |= rows
    flat = FlatSpace(children, num_windows=windows_of_flat(children, window_pages=8))
    check(flat, table, wanted, rng)
    other, rows = random_space(rng, len(children), table)
    nested = FlatSpace([flat, other], num_windows=windows_of_flat([flat, other], window_pages=8))
    check(nested, table, wanted | rows, rng)


def test_only_a_child_with_fewer_pages_than_windows_is_cut() -> None:
    rng = random.Random(1)
    large, small = SourceSpace(0, sizes_of(rng, 400)), SourceSpace(1, sizes_of(rng, 2, most_rows=90))
    num_windows = windows_of_flat([large, small], window_pages=8)
    flat = FlatSpace([large, small], num_windows=num_windows)
    cut = -(-small.num_rows // SMALL_UNIT_ROWS)
    assert num_windows == 51 and flat.num_units == 400 + cut
    assert -(-flat.num_units // flat.window_units) <= num_windows
    last = np.array([flat.num_units - 1], np.int64)
    assert [(s, pages.tolist()) for s, pages in flat.pages(last)] == [(1, [0, 1])], "a small child stays decoded"


def test_a_view_keeps_the_rows_in_a_window_and_pays_for_no_page_without() -> None:
    rng = random.Random(2)
    sizes = sizes_of(rng, 1000)
    assert window_units_of_view(num_pages=1000, num_rows=5000, num_kept=500, window_pages=7) == 70
    assert window_units_of_view(num_pages=1000, num_rows=5000, num_kept=5, window_pages=7) == 1000
    assert window_units_of_view(num_pages=1000, num_rows=5000, num_kept=5000, window_pages=7) == 7
    view = ViewSpace(0, sizes, np.array([40, 41], np.uint32), window_units=1000)
    held = view.pages(all_units(view))[0][1]
    assert len(held) <= 2 and view.pages(np.array([999], np.int64)) == []


def test_a_flat_of_more_than_2_to_the_32_rows_has_its_own_numbers() -> None:
    class Wide:
        """A space of rows whose lengths and places follow from their numbers."""

        num_rows = num_kept = num_units = 1 << 33
        window_units, longest_tokens, num_tokens = 256, 9, 1 << 33

        def __init__(self, source: int) -> None:
            self.source = source

        def members(self, units: Int64Array):
            from torchmix.mixture.spaces import Members

            return Members(units, None, len(units))

        def tokens(self, rows: Int64Array):
            return (rows % 9).astype(np.int32)

        def places(self, rows: Int64Array):
            return np.full(len(rows), self.source), rows

        def pages(self, units: Int64Array):
            return [(self.source, units)]

    children = [Wide(0), Wide(1)]
    flat = FlatSpace(children, num_windows=windows_of_flat(children, 256))
    assert flat.num_rows == 1 << 34
    rows = np.array([(1 << 34) - 1, 0, (1 << 33), (1 << 33) - 1, (1 << 32) + 7])
    source, row = flat.places(rows)
    assert source.tolist() == [1, 0, 1, 0, 0]
    assert row.tolist() == [(1 << 33) - 1, 0, 0, (1 << 33) - 1, (1 << 32) + 7]
    assert flat.members(np.array([(1 << 33) + 5])).rows.tolist() == [(1 << 33) + 5]
