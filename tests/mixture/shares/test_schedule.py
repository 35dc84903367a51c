"""Shares over training: the mean over a step's tokens is exact, whatever border or ramp lies inside of it."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from tests.support import book_shares
from torchmix.array_types import Int64Array
from torchmix.mixture.shares import RAMP_SHAPES, SHARE_ONE, Schedule, ShareChange
from torchmix.recipe.changes import SHAPES


def random_shares(rng: random.Random, count: int) -> Int64Array:
    cuts = sorted(rng.randint(0, SHARE_ONE) for _ in range(count - 1))
    return np.diff([0, *cuts, SHARE_ONE]).astype(np.int64)


def random_schedule(rng: random.Random, count: int, unit: int) -> tuple[Schedule, Int64Array, list[ShareChange]]:
    start, at, changes = random_shares(rng, count), 0, []
    for _ in range(rng.randint(1, 5)):
        begin = at + rng.choice([0, rng.randint(0, 5 * unit)])
        at = begin + rng.choice([0, rng.randint(1, 9 * unit)])
        changes.append(ShareChange(start_token=begin, stop_token=at, shares=random_shares(rng, count)))
    return Schedule(start, changes), start, changes


def share_at(start: Int64Array, changes: list[ShareChange], stream: int, token: Fraction) -> Fraction:
    """The share at one point, by its definition."""
    now = Fraction(int(start[stream]))
    for change in changes:
        if token < change.start_token:
            break
        after = Fraction(int(change.shares[stream]))
        if token < change.stop_token:
            return now + (after - now) * (token - change.start_token) / (change.stop_token - change.start_token)
        now = after
    return now


def mean_share(start: Int64Array, changes: list[ShareChange], stream: int, begin: int, end: int) -> Fraction:
    """The mean over [begin, end): between borders the share is a line, so the value in the middle is its mean."""
    borders = {begin, end, *(t for change in changes for t in (change.start_token, change.stop_token))}
    inside = sorted(t for t in borders if begin <= t <= end)
    total = Fraction(0)
    for left, right in pairwise(inside):
        total += share_at(start, changes, stream, Fraction(left + right, 2)) * (right - left)
    return total / (end - begin)


@pytest.mark.parametrize("seed", range(30))
def test_a_step_has_the_mean_over_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    count, unit = rng.choice([1, 2, 7, 40]), rng.choice([1, 10, 1 << 20, 10**12])
    schedule, start, changes = random_schedule(rng, count, unit)
    for _ in range(20):
        begin = rng.randint(0, 12 * unit)
        end = begin + rng.randint(1, max(1, min(3 * unit, 1 << 30)))
        shares = schedule.shares(begin, end)
        assert shares.dtype == np.int64 and int(shares.sum()) == SHARE_ONE and shares.min() >= 0
        for stream in range(count):
            exact = mean_share(start, changes, stream, begin, end)
            assert abs(int(shares[stream]) - exact) <= 1 and (shares[stream] > 0) == (exact > 0)


def test_a_border_inside_a_step_counts_for_the_tokens_behind_it() -> None:
    before, after = np.array([SHARE_ONE, 0]), np.array([0, SHARE_ONE])
    schedule = Schedule(before, [ShareChange(start_token=1000, stop_token=1000, shares=after)])
    assert schedule.shares(0, 1000) is before and schedule.shares(1000, 2000) is after
    assert schedule.shares(750, 1750).tolist() == [SHARE_ONE // 4, SHARE_ONE // 4 * 3]
    assert Schedule(before).is_constant and not schedule.is_constant


def test_a_ramp_reaches_its_end_and_stays() -> None:
    before, after = np.array([SHARE_ONE, 0]), np.array([0, SHARE_ONE])
    schedule = Schedule(before, [ShareChange(start_token=0, stop_token=4000, shares=after)])
    steps = [schedule.shares(at, at + 1000)[1] / SHARE_ONE for at in range(0, 6000, 1000)]
    assert steps == [0.125, 0.375, 0.625, 0.875, 1.0, 1.0]


def test_a_share_that_is_tiny_in_a_step_is_not_zero_in_it() -> None:
    before, after = np.array([SHARE_ONE, 0]), np.array([SHARE_ONE - 1, 1])
    schedule = Schedule(before, [ShareChange(start_token=999, stop_token=999, shares=after)])
    assert schedule.shares(0, 1000).tolist() == [SHARE_ONE - 1, 1]


def test_both_halves_of_the_table_have_the_same_shapes() -> None:
    assert set(SHAPES) == set(RAMP_SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_goes_from_0_to_1_and_its_area_is_the_integral_of_its_progress(name: str) -> None:
    shape = RAMP_SHAPES[name]
    assert (shape.progress(Fraction(0)), shape.progress(Fraction(1))) == (0, 1)
    assert (shape.area(Fraction(0)), shape.area(Fraction(1))) == (0, Fraction(1, 2))
    places = [Fraction(number, 1000) for number in range(1001)]
    for low, high in pairwise(places):
        ends = shape.progress(low), shape.progress(high)
        middle = shape.progress((low + high) / 2)
        assert ends[0] <= middle <= ends[1]
        mean = (shape.area(high) - shape.area(low)) / (high - low)
        assert abs(mean - (ends[0] + 4 * middle + ends[1]) / 6) < Fraction(1, 10**13)  # Simpson's rule


def test_a_cosine_is_that_of_the_library_and_its_area_that_of_the_book() -> None:
    rng = random.Random(31)
    for _ in range(300):
        length = rng.choice([7, 1000, 10**9, 10**18])
        part = Fraction(rng.randint(0, length), length)
        shape = RAMP_SHAPES["cosine"]
        assert float(shape.progress(part)) == pytest.approx((1 - math.cos(math.pi * part)) / 2, abs=1e-15)
        assert shape.area(part) == book_shares.area("cosine", part)


@pytest.mark.parametrize("seed", range(10))
def test_a_step_of_a_cosine_ramp_has_the_mean_of_the_book(seed: int) -> None:
    rng = random.Random(seed)
    unit = rng.choice([10, 1 << 20, 10**12, 10**16])
    begin, length = rng.randint(0, 3 * unit), rng.randint(1, 9 * unit)
    before, after = (random_shares(rng, 5) for _ in range(2))
    change = ShareChange(start_token=begin, stop_token=begin + length, shares=after, shape="cosine")
    plain = {
        "mixture": {str(s): int(share) for s, share in enumerate(before)},
        "schedule": [
            {
                "from": f"{begin} tokens",
                "to": f"{begin + length} tokens",
                "shape": "cosine",
                "mixture": {str(s): int(share) for s, share in enumerate(after)},
            }
        ],
    }
    for _ in range(20):
        first = rng.randint(0, begin + length + unit)
        last = first + rng.randint(1, max(1, unit // 2))
        shares = Schedule(before, [change]).shares(first, last)
        exact = book_shares.mean_shares(plain, first, last, set(), None)
        assert int(shares.sum()) == SHARE_ONE and shares.min() >= 0
        for stream in range(5):
            assert abs(int(shares[stream]) - exact[str(stream)] * SHARE_ONE) <= 1


def test_the_first_and_the_last_step_of_the_longest_cosine_ramp_have_no_share_below_0() -> None:
    before, after = np.array([SHARE_ONE, 0]), np.array([0, SHARE_ONE])
    schedule = Schedule(before, [ShareChange(start_token=0, stop_token=10**18, shares=after, shape="cosine")])
    assert schedule.shares(0, 1).tolist() == [SHARE_ONE - 1, 1]
    assert schedule.shares(10**18 - 1, 10**18).tolist() == [1, SHARE_ONE - 1]
