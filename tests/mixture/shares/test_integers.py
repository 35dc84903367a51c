from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from torchmix.mixture.shares import SHARE_ONE, integer_shares


def random_fractions(rng: random.Random) -> dict[str, Fraction]:
    """Shares as a recipe gives them: decimals; and as a run-out leaves them: any fractions, some 0."""
    count = rng.choice([1, 2, 3, 7, 40, 306])
    kind = rng.choice(["decimals", "skewed", "equal", "tiny"])
    weights = {
        "decimals": [rng.randint(1, 10**6) for _ in range(count)],
        "skewed": [int(10 ** rng.uniform(0, 12)) for _ in range(count)],
        "equal": [1] * count,
        "tiny": [10**15] + [rng.choice([0, 1, 10**5, 3 * 10**5]) for _ in range(count - 1)],
    }[kind]
    return {f"source-{i}": Fraction(weight, rng.choice([1, sum(weights)])) for i, weight in enumerate(weights)}


def cases() -> list[dict[str, Fraction]]:
    rng = random.Random(20)
    drawn = (random_fractions(rng) for _ in range(80))
    return [
        {name: share * (1 / total) for name, share in each.items()} for each in drawn if (total := sum(each.values()))
    ]


def slow_shares(fractions: dict[str, Fraction]) -> dict[str, int]:
    """Largest remainders, one unit at a time: who is furthest below its share is given one more."""
    total = sum(fractions.values())
    exact = {name: share / total * SHARE_ONE for name, share in fractions.items()}
    shares = {name: max(int(value), 1) if value else 0 for name, value in exact.items()}
    while sum(shares.values()) < SHARE_ONE:
        shares[max(sorted(exact), key=lambda name: exact[name] - shares[name])] += 1
    # Too many were lifted from zero to one: the largest pays, of equals the one that sorts last.
    shares[max(sorted(exact, reverse=True), key=lambda name: shares[name])] -= sum(shares.values()) - SHARE_ONE
    return shares


def test_shares_are_those_of_giving_out_units_one_by_one():
    for fractions in cases():
        slow = slow_shares(fractions)
        assert integer_shares(fractions).tolist() == [slow[name] for name in sorted(fractions)], fractions


def test_shares_sum_to_one_and_none_above_zero_is_lost_or_off_by_a_unit():
    for fractions in cases():
        shares = integer_shares(fractions)
        assert shares.dtype == np.int64
        assert int(shares.sum()) == SHARE_ONE
        exact = [fractions[name] * SHARE_ONE for name in sorted(fractions)]
        lifted = sum(0 < value < 1 for value in exact)
        for share, value in zip(shares.tolist(), exact, strict=True):
            assert (share > 0) == (value > 0)
            assert share < value + 1
            assert share > value - 1 - lifted  # the largest pays for shares lifted from zero to one


def test_a_share_lifted_to_one_is_not_given_the_units_of_others_too():
    # Of 2^32: 0.9, 2.6 and 2^32 - 3.5. Floors leave two units: one lifts `a` from zero, one is owed to `b`.
    tenth = Fraction(1, 10 * SHARE_ONE)
    fractions = {"a": 9 * tenth, "b": 26 * tenth, "c": 1 - 35 * tenth}
    assert integer_shares(fractions).tolist() == [1, 3, SHARE_ONE - 4]


def test_ties_go_to_the_name_that_sorts_first():
    thirds = {name: Fraction(1, 3) for name in ("c", "a", "b")}
    third = SHARE_ONE // 3
    assert integer_shares(thirds).tolist() == [third + 1, third, third]
    sevenths = {name: Fraction(1, 7) for name in "gfedcba"}  # 2^32 = 7 x 613566756 + 4
    assert integer_shares(sevenths).tolist() == [613566757] * 4 + [613566756] * 3


def test_the_order_of_the_recipe_means_nothing():
    rng = random.Random(21)
    for fractions in cases()[:50]:
        shuffled = list(fractions.items())
        rng.shuffle(shuffled)
        assert np.array_equal(integer_shares(dict(shuffled)), integer_shares(fractions))


def test_names_sort_as_text_and_not_by_number():
    assert integer_shares({"s10": Fraction(1, 4), "s9": Fraction(3, 4)}).tolist() == [
        SHARE_ONE // 4,
        3 * SHARE_ONE // 4,
    ]


def test_shares_that_are_left_when_sources_have_run_out_are_scaled_up():
    left = {"a": Fraction(1, 5), "b": Fraction(0), "c": Fraction(1, 20)}
    assert integer_shares(left).tolist() == [SHARE_ONE * 4 // 5 + 1, 0, SHARE_ONE // 5]


@pytest.mark.parametrize("share", [Fraction(1, 10**5), Fraction(1, 10**12), Fraction(1, 10**300)])
def test_a_tiny_share_is_never_zero(share):
    rest, tiny = integer_shares({"rest": 1 - share, "tiny": share}).tolist()
    assert tiny == max(1, round(share * SHARE_ONE))
    assert rest == SHARE_ONE - tiny
