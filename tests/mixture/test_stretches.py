"""Parts of documents that follow each other become one stretch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torchmix.mixture.draw import Stretches, joined

NAMES = ("stream", "epoch", "row", "start", "tokens", "document_tokens")


def stretches(*rows: tuple[int, ...]) -> Stretches:
    table = np.array(rows, np.int64).reshape(-1, len(NAMES))
    return Stretches(**{name: table[:, column] for column, name in enumerate(NAMES)})


def rows_of(table: Stretches) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(table, name).tolist() for name in NAMES), strict=True))


def test_parts_of_one_document_are_joined_over_draws_and_others_are_not() -> None:
    first = stretches((0, 0, 7, 0, 16, 99), (1, 0, 3, 16, 16, 40), (2, 0, 5, 0, 8, 8))
    second = stretches((0, 0, 7, 16, 32, 99), (1, 0, 3, 32, 8, 40), (1, 0, 4, 0, 0, 0), (1, 1, 3, 0, 16, 40))
    assert rows_of(joined([first, second])) == [
        (0, 0, 7, 0, 48, 99),
        (1, 0, 3, 16, 24, 40),
        (1, 1, 3, 0, 16, 40),
        (2, 0, 5, 0, 8, 8),
    ]
    assert rows_of(joined([])) == []


def test_a_document_that_comes_again_begins_again() -> None:
    whole = (0, 0, 7, 0, 16, 16)
    assert rows_of(joined([stretches(whole, (0, 1, *whole[2:]))])) == [whole, (0, 1, *whole[2:])]


@pytest.mark.parametrize("seed", range(10))
def test_joining_keeps_every_token_in_order(seed: int) -> None:
    draw = random.Random(seed)
    parts, left = [], {s: [] for s in range(3)}
    for s in left:
        for row in range(6):
            tokens = draw.randint(0, 60)
            left[s] += [(s, 0, row, start, min(16, tokens - start), tokens) for start in range(0, max(1, tokens), 16)]
    expected = [(s, row, start + i) for s in left for _, _, row, start, count, _ in left[s] for i in range(count)]
    while any(left.values()):
        part = []
        for s in left:
            take = draw.randint(0, 5)
            part += left[s][:take]
            left[s] = left[s][take:]
        parts.append(stretches(*part))
    found = rows_of(joined(parts))
    assert [(s, row, start + i) for s, _, row, start, count, _ in found for i in range(count)] == expected
    assert len(found) == len({(s, row) for s, row, _ in expected})
