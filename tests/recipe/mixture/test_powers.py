from __future__ import annotations

import random
from fractions import Fraction

import pytest

from torchmix.recipe.fit import power


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(1, 2), Fraction("0.7"), Fraction(1)])
def test_a_power_is_the_largest_number_that_is_not_above_it(exponent: Fraction) -> None:
    rng = random.Random(3)
    for _ in range(50):
        tokens = rng.randint(1, 10 ** rng.randint(1, 15))
        value = power(tokens, exponent)
        exact = tokens**exponent.numerator << (64 * exponent.denominator)
        assert value**exponent.denominator <= exact < (value + 1) ** exponent.denominator
        assert value / 2**64 == pytest.approx(tokens ** float(exponent))


def test_nothing_has_no_share_whatever_the_exponent() -> None:
    assert power(0, Fraction(0)) == power(0, Fraction(1, 2)) == 0
