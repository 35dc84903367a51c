"""Shares, percentages and sizes in bytes, exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from torchmix.errors import RecipeError
from torchmix.recipe.structs import Share

# --- Shares and percentages, exactly.
#
# Cost: a microsecond each.


def parse_fraction(text: str, where: str) -> Fraction:
    """Exact value of any percentage.

    Raises:
        RecipeError: Not a percentage.
    """
    share = _fraction(text)
    if share is None:
        raise RecipeError(f"{text!r} is not a percentage, as 70%, 0.001% or 1e-3%", where)
    return share


def parse_share(share: Share, where: str) -> Fraction:
    """Exact value of a share of 0 or more: a percentage, a fraction, or a number.

    Raises:
        RecipeError: It is none of these, or below 0.
    """
    if isinstance(share, str) and (match := re.fullmatch(r"\s*(\d{1,100})\s*/\s*(\d{1,100})\s*", share, re.ASCII)):
        if not int(match[2]):
            raise RecipeError(f"{share!r} divides by 0", where)
        value = Fraction(int(match[1]), int(match[2]))
    elif isinstance(share, str):
        value = parse_fraction(share, where)
    elif isinstance(share, int) and abs(share) >= 1 << 63:
        raise RecipeError("a number of more than 64 bits is no share", where)
    elif (isinstance(share, float) and share != share) or share in (float("inf"), float("-inf")):
        raise RecipeError(f"{share} is no share", where)
    else:
        value = Fraction(Decimal(repr(share)))
    if value < 0:
        raise RecipeError(f"the share {share} is below 0", where)
    return value


@lru_cache(maxsize=1 << 12)
def _fraction(text: str) -> Fraction | None:
    """The value of a percentage; cached, since a start reads each share of a recipe several times."""
    match = re.fullmatch(
        r"([+-]?(?:\d{1,100}\.?\d{0,100}|\.\d{1,100})(?:[eE][+-]?\d{1,3})?)\s*%", text.strip(), re.ASCII
    )
    return None if match is None else Fraction(match[1]) / 100


def numerators(fractions: Iterable[Fraction]) -> tuple[list[int], int]:
    """Numerators over the least common denominator, and that denominator. Adds up hundreds without a gcd for each."""
    fractions = tuple(fractions)
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (denominator // fraction.denominator) for fraction in fractions], denominator


def apportioned(parts: Sequence[int], whole: int, total: int) -> list[int]:
    """Integers that sum to `total`, as near to `parts` / `whole` as largest remainders bring them.

    Args:
        parts: In the order of names: equal remainders go to the first.
        whole: Positive; the parts are about `total` times as much.
        total: The sum.

    Returns:
        An integer for each part, at least 1 where it is positive. The largest one pays for that, of equal ones the
        last.

    Source: Hamilton's method.
    """
    given = [max(part // whole, 1) if part > 0 else 0 for part in parts]
    missing = total - sum(given)
    # Remainders: what is lifted from zero to one already has more than its exact part, and comes last.
    by_remainder = sorted(range(len(parts)), key=lambda i: (given[i] * whole - parts[i], i))
    for i in by_remainder[: max(missing, 0)]:
        given[i] += 1
    if missing < 0:
        given[max(range(len(given)), key=lambda i: (given[i], i))] += missing
    return given


def share_text(share: Fraction) -> str:
    """A share for a message: an exact percentage where it has one, else a fraction."""
    rest = share.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return percent_text(share) if rest == 1 else str(share)


def percent_text(share: Fraction) -> str:
    """A share as an exact percentage; it must be a sum of decimals, as all parsed percentages are."""
    digits = 0
    while (scaled := share * 10 ** (digits + 2)).denominator != 1:
        digits += 1
    whole, rest = divmod(scaled.numerator, 10**digits)
    return f"{whole}.{rest:0{digits}}%" if digits else f"{whole}%"


def weights_of(shares: Mapping[str, Share], where: str) -> dict[str, Fraction]:
    """The exact shares of the children of one group; ratios of numbers are not scaled yet.

    Raises:
        RecipeError: Percentages do not sum to 100 %, or stand beside numbers; or all shares are 0.
    """
    texts = [name for name, share in shares.items() if isinstance(share, str)]
    weights = {name: parse_share(share, f"{where}.{name}") for name, share in shares.items()}
    if texts and len(texts) < len(shares):
        number = next(name for name in shares if name not in texts)
        raise RecipeError(
            f"{shares[number]} is a number, and {texts[0]} has a share as text; write all as text (70%), or all as "
            "numbers, which are ratios",
            f"{where}.{number}",
        )
    parts, whole = numerators(weights.values())
    if texts and sum(parts) != whole:
        total = Fraction(sum(parts), whole)
        gap = "missing" if total < 1 else "too much"
        message = f"the shares sum to {share_text(total)}, not 100%; {share_text(abs(1 - total))} is {gap}"
        raise RecipeError(message, where)
    if not any(parts):
        raise RecipeError("all shares are 0", where)
    return weights


# --- Sizes in bytes, as text: `64MiB`.
#
# A size that is read is never rounded.

BYTES_OF_UNIT = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES_OF_UNIT |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@lru_cache(maxsize=64)
def parse_bytes(size: str | int, *, where: str) -> int:
    """Number of bytes of a size.

    Args:
        size: `64MiB`, `1GiB`, `512KiB` (powers of 1024), `100MB` (powers of 1000), `1.5GiB`, or plain bytes.
        where: Path of keys of the value, for the error.

    Raises:
        RecipeError: Not a size, not a whole number of bytes, or less than 1 byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d{1,9})?)\s*([A-Za-z]*)", str(size).strip(), re.ASCII)
    unit = {name.lower(): name for name in BYTES_OF_UNIT}.get(match[2].lower()) if match else None
    if match is None or unit is None or len(match[1]) > 30:
        raise RecipeError(f"{size!r} is not a size, as 64MiB, 1GiB, 100MB or a number of bytes", where)
    num_bytes = Fraction(match[1]) * BYTES_OF_UNIT[unit]
    if num_bytes.denominator != 1 or not 1 <= num_bytes < 2**63:
        raise RecipeError(f"{size!r} is not a whole number of bytes from 1 to 2**63 - 1", where)
    return int(num_bytes)


def bytes_text(num_bytes: float) -> str:
    """A size in the largest unit that leaves at least one: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
