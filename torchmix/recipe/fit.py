"""Shares in proportion to sizes, and shares of cells from those of several properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from torchmix.errors import RecipeError

# --- Sizes -> shares in proportion to a power of them.
#
# Integers alone decide, so every machine has the same ones. Cost: some big integers a child, once, when a catalog is
# first published.
#
# With exponent 1 a child has its natural share; with less, small ones are lifted: the temperature of multilingual runs
# (exponent 1/T; Conneau et al., "Unsupervised Cross-lingual Representation Learning at Scale", 2020, section 3.1).

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


# --- Shares of several properties -> shares of the cells where they meet.
#
# Integers alone decide, in one order, so every machine has the same shares. Cost: a pass over the cells for each
# property and round, some hundred rounds, when a planner is made; no step pays for it.
#
# The method is iterative proportional fitting (Deming and Stephan, 1940): each property in turn scales its cells to
# its shares, until all hold. Where no shares of the existing cells satisfy all properties, it does not converge; the
# error then names the nearest shares that it reached.

_ONE = 1 << 96
"""The sum of all cells while they are fitted."""
_CLOSE = 1 << 56
"""How far a value may be from its share at the end: 2^-40 of the whole."""
_MOST_ROUNDS = 4000


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Shares that satisfy every property."""

    shares: Mapping[tuple[str, ...], Fraction]
    """Share of each cell, keyed by its value of every property; they sum to 1."""
    num_rounds: int


def fit_cells(
    sizes: Mapping[tuple[str, ...], int],
    properties: Sequence[str],
    shares: Sequence[Mapping[str, Fraction]],
    *,
    may_miss: bool = False,
) -> Fit:
    """Fit the shares of cells.

    Args:
        sizes: Tokens of each cell, by the value of every property, in the order of `properties`; a cell without
            tokens does not exist.
        properties: Names of the properties, for errors.
        shares: For each property, the share of each of its values, above 0; they sum to 1. A cell with another value
            gets nothing.
        may_miss: Whether cells that cannot have the shares get the nearest ones that they can have, in place of an
            error.

    Raises:
        RecipeError: A value that no cell has; or shares that no cells can have together, with the nearest that they
            can.
    """
    names = [sorted(values) for values in shares]
    cells = sorted(cell for cell, size in sizes.items() if size > 0 and _has_shares(cell, shares))
    for at, present in enumerate(names):
        for value in present:
            if not may_miss and not any(cell[at] == value for cell in cells):
                raise RecipeError(f"no document has {properties[at]} {value!r} together with the other properties")
    total = sum(sizes[cell] for cell in cells)
    parts = [max(1, sizes[cell] * _ONE // total) for cell in cells]
    members = [
        [(int(share[value] * _ONE), [c for c, cell in enumerate(cells) if cell[at] == value]) for value in names[at]]
        for at, share in enumerate(shares)
    ]
    for num_rounds in range(1, _MOST_ROUNDS + 1):
        for values in members:
            _scale(parts, values)
        if all(_is_close(parts, values) for values in members) or (may_miss and num_rounds == _MOST_ROUNDS):
            whole = sum(parts)
            fitted = {cell: Fraction(part, whole) for cell, part in zip(cells, parts, strict=True)}
            return Fit(shares=fitted, num_rounds=num_rounds)
    raise RecipeError(_infeasible(parts, properties, names, members))


def _has_shares(cell: tuple[str, ...], shares: Sequence[Mapping[str, Fraction]]) -> bool:
    return all(value in share for value, share in zip(cell, shares, strict=True))


def _scale(parts: list[int], values: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Scale the cells of each value of a property to its share; a cell never falls to 0."""
    for wanted, cells in values:
        total = sum(parts[c] for c in cells)
        for c in cells:
            parts[c] = max(1, parts[c] * wanted // total)


def _is_close(parts: Sequence[int], values: Sequence[tuple[int, Sequence[int]]]) -> bool:
    return all(abs(sum(parts[c] for c in cells) - wanted) <= _CLOSE for wanted, cells in values)


def _infeasible(
    parts: Sequence[int],
    properties: Sequence[str],
    names: Sequence[Sequence[str]],
    members: Sequence[Sequence[tuple[int, Sequence[int]]]],
) -> str:
    """The error for shares that contradict each other; it names the feasible shares of the last round."""
    whole = sum(parts)
    nearest = []
    for at, values in enumerate(members):
        reached = [
            f"{value} {100 * sum(parts[c] for c in cells) / whole:.4g} %"
            for value, (_, cells) in zip(names[at], values, strict=True)
        ]
        nearest.append(f"{properties[at]}: {', '.join(reached)}")
    return (
        f"no shares of the cells that exist give all properties what they ask for; the nearest are {'; '.join(nearest)}"
    )
