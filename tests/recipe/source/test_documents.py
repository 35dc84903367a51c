"""Rows of a part: parts touch, never overlap, and are cut where Megatron cuts them."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from torchmix.recipe.sources import PARTS, documents_of_split, fractions_of, rows_of
from torchmix.recipe.structs import Source

SPLITS = [(969, 30, 1), (98, 2, 0), (1, 1, 1), (99.5, 0.5), (1,), (0.1, 0.2, 0.7), (949, 50, 1), (90, 0, 10)]
NUM_ROWS = (1, 2, 3, 10, 50, 500, 1500, 12_345, 1_000_000, 2**31 + 1)


def source(documents: tuple[str, str] | None) -> Source:
    return Source(path="a", tokens="t", documents=documents)


def test_without_documents_all_rows_are_used() -> None:
    assert fractions_of(source(None)) == (0, 1)
    assert rows_of(source(None), 17) == (0, 17)
    assert rows_of(source(("0%", "100%")), 17) == (0, 17)


def test_bounds_are_rounded_half_to_even() -> None:
    assert fractions_of(source(("25%", "96.9%"))) == (Fraction(1, 4), Fraction(969, 1000))
    assert [rows_of(source(("25%", "75%")), rows) for rows in (2, 6, 10)] == [(0, 2), (2, 4), (2, 8)]


def bounds_of_megatron(split: tuple[float, ...], num_rows: int) -> list[tuple[int, int] | None]:
    """What parse_and_normalize_split, convert_split_vector_to_split_matrix and the builder compute, as they do it."""
    weights = np.array([*map(float, split), *[0.0] * (3 - len(split))])
    normalized = (weights / np.sum(weights)).tolist()
    expansion = [0]
    for weight in normalized:
        expansion.append(expansion[-1] + weight)
    return [
        None if stop <= start else (round(start * float(num_rows)), round(stop * float(num_rows)))
        for start, stop in itertools.pairwise(expansion)
    ]


def rows_of_parts(split: tuple[float, ...], num_rows: int) -> list[tuple[int, int] | None]:
    documents = [documents_of_split(split, part) for part in PARTS]
    return [None if each is None else rows_of(source(each), num_rows) for each in documents]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_split_cuts_where_megatron_does(split: tuple[float, ...], num_rows: int) -> None:
    parts = rows_of_parts(split, num_rows)
    assert parts == bounds_of_megatron(split, num_rows)
    bounds = [bound for part in parts if part is not None for bound in part]
    assert bounds[0] == 0
    assert bounds[1:-1:2] == bounds[2::2]
    assert bounds[-1] == num_rows


def test_random_splits_are_cut_where_megatron_cuts_them() -> None:
    rng = random.Random(3)
    for _ in range(300):
        split = tuple(rng.choice((rng.randint(1, 999), round(rng.random(), 3) + 0.001)) for _ in range(3))
        num_rows = rng.randint(1, 10**7)
        assert rows_of_parts(split, num_rows) == bounds_of_megatron(split, num_rows), (split, num_rows)


def test_the_bounds_of_a_split_are_readable() -> None:
    assert [documents_of_split((969, 30, 1), part) for part in PARTS] == [
        ("0%", "96.9%"),
        ("96.9%", "99.9%"),
        ("99.9%", "100%"),
    ]
    assert documents_of_split((98, 2), "test") is None
    assert documents_of_split((98, 0, 2), "validation") is None
