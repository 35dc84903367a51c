"""Shares of the mixture, exactly.

In: percentages as text. Out: fractions. Must hold: nothing is rounded, so `0.1%` is a thousandth, and the shares of a
checked recipe sum to 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.structs import Part, Recipe
from torchmix.recipe.yaml_lines import key_path


def parse_percent(text: str, where: str) -> Fraction:
    """Exact value of a percentage above 0, as `70%`, `0.001%` or `1e-3%`.

    Raises:
        RecipeError: Not a percentage, or not above 0.
    """
    share = parse_fraction(text, where)
    if share <= 0:
        raise RecipeError(f"the share {text} is not above 0; remove the source instead", where)
    return share


def parse_fraction(text: str, where: str) -> Fraction:
    """Exact value of any percentage.

    Raises:
        RecipeError: Not a percentage.
    """
    share = _fraction(text)
    if share is None:
        raise RecipeError(f"{text!r} is not a percentage, as 70%, 0.001% or 1e-3%", where)
    return share


@lru_cache(maxsize=1 << 12)
def _fraction(text: str) -> Fraction | None:
    """The value of a percentage; a start asks for each of a recipe's shares several times."""
    match = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*%", text.strip(), re.ASCII)
    return None if match is None else Fraction(match[1]) / 100


def numerators(fractions: Iterable[Fraction]) -> tuple[list[int], int]:
    """Fractions over their least common denominator, and that: to add up hundreds of them without a gcd each."""
    fractions = tuple(fractions)
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (denominator // fraction.denominator) for fraction in fractions], denominator


def percent_text(share: Fraction) -> str:
    """A share as an exact percentage; it must be a sum of decimals, as all parsed percentages are."""
    digits = 0
    while (scaled := share * 10 ** (digits + 2)).denominator != 1:
        digits += 1
    whole, rest = divmod(scaled.numerator, 10**digits)
    return f"{whole}.{rest:0{digits}}%" if digits else f"{whole}%"


def parse_shares(recipe: Recipe | Part, where: str = "") -> dict[str, Fraction]:
    """Exact share of trained tokens of each source.

    Args:
        recipe: A recipe, or its validation or test part.
        where: Path of keys of the part, for errors.

    Returns:
        Name -> share in (0, 1], in the order of names; the sum is 1.

    Raises:
        RecipeError: A share that is no positive percentage, a sum other than 100 %, or names that differ
            from those of `sources`.
    """
    mixture = key_path(where, "mixture")
    if not recipe.sources:
        raise RecipeError("names no source", key_path(where, "sources"))
    for name in recipe.mixture:
        if name not in recipe.sources:
            raise RecipeError(f"there is no such source{nearest(name, recipe.sources)}", f"{mixture}.{name}")
    shares: dict[str, Fraction] = {}
    for name in sorted(recipe.sources):
        if name not in recipe.mixture:
            message = f"the source {name!r} has no share; give it one, or remove the source"
            raise RecipeError(message, f"{mixture}.{name}")
        shares[name] = parse_percent(recipe.mixture[name], f"{mixture}.{name}")
    parts, whole = numerators(shares.values())
    if sum(parts) != whole:
        total = Fraction(sum(parts), whole)
        gap = "missing" if total < 1 else "too much"
        message = f"the shares sum to {percent_text(total)}, not 100%; {percent_text(abs(1 - total))} is {gap}"
        raise RecipeError(message, mixture)
    return shares
