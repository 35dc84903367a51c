"""Sizes -> shares in proportion to a power of them.

In: tokens of each child of a group, and an exponent. Out: integers in that proportion. Must hold: integers alone
decide, so every machine has the same ones. Cost: some big integers a child, once, when a catalog is first published.

With exponent 1 a child has its natural share; with less, small ones are lifted: the temperature of multilingual runs
(exponent 1/T; Conneau et al., "Unsupervised Cross-lingual Representation Learning at Scale", 2020, section 3.1).
"""

from __future__ import annotations

from fractions import Fraction

_FRACTION_BITS = 64
"""Bits of a power after the binary point."""
MOST_DENOMINATOR = 1000
"""Largest denominator of an exponent: three decimals."""


def power(num_tokens: int, exponent: Fraction) -> int:
    """`num_tokens` to the exponent, times 2^64, rounded down.

    Args:
        num_tokens: 0 or more; the power of 0 is 0.
        exponent: In [0, 1], with a denominator of at most 1000.
    """
    assert 0 <= exponent <= 1 and exponent.denominator <= MOST_DENOMINATOR, exponent
    if num_tokens == 0:
        return 0
    degree = exponent.denominator
    return _root(num_tokens**exponent.numerator << (_FRACTION_BITS * degree), degree)


def _root(value: int, degree: int) -> int:
    """The largest integer whose power `degree` is at most `value`, by Newton's method from above."""
    if degree == 1 or value == 0:
        return value
    guess = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess
        guess = better
