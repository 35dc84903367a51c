"""The shares of a step by docs/formats.md, from the plain values of a recipe, in exact fractions; see `book_order`.

In: a mixture of ratios, with at most one change, and the tokens that a step covers. Out: the share of each stream.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from typing import Any


def still_begun(schedule: list[dict[str, Any]], decisions: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    """Section "Schedule": what an edited schedule still has of begun changes, each (step, stream, epochs).

    Places of other changes are in steps.
    """
    kept, found = [], -1
    for step, stream, epochs in decisions:
        passed = [
            number
            for number, change in enumerate(schedule)
            if isinstance(change["from"], str) and int(change["from"].split()[0]) <= step
        ]
        first = max([found, *passed]) + 1
        same = [n for n in range(first, len(schedule)) if schedule[n]["from"] == {"epochs": epochs, "of": stream}]
        found = max([found, *passed])
        if same:
            found = same[0]
            kept.append((step, stream, epochs))
    return kept


def shares_of_tree(tree: dict[str, Any], gone: set[str]) -> dict[str, Fraction]:
    """Exact shares of the streams, in which siblings have what ran out."""

    def has_any(name: str, value: Any) -> bool:
        if isinstance(value, dict) and "children" in value:
            return any(has_any(child, one) for child, one in value["children"].items())
        return name not in gone

    def share_out(children: dict[str, Any], whole: Fraction, into: dict[str, Fraction]) -> None:
        weights = {n: Fraction(v["share"] if isinstance(v, dict) else v) * has_any(n, v) for n, v in children.items()}
        total = sum(weights.values(), Fraction(0))
        for name, value in children.items():
            part = whole * weights[name] / total if total else Fraction(0)
            if isinstance(value, dict) and "children" in value:
                share_out(value["children"], part, into)
            else:
                into[name] = part

    found: dict[str, Fraction] = {}
    share_out(tree, Fraction(1), found)
    return found


def mean_shares(plain: dict[str, Any], start: int, stop: int, gone: set[str], begun: int | None) -> dict[str, Fraction]:
    """The mean of the schedule over tokens [start, stop), piece by piece of its ramps.

    `begun`: where a change at an epoch has begun.
    """
    before = shares_of_tree(plain["mixture"], gone)
    if "schedule" not in plain:
        return before
    [change] = plain["schedule"]
    after = shares_of_tree(change["mixture"], gone)
    if isinstance(change["from"], dict):
        if begun is None:
            return before
        begin, end = begun, begun + int(change.get("to", "0 tokens").split()[0])
    else:
        begin = int(change["from"].split()[0])
        end = int(change.get("to", change["from"]).split()[0])
    edges = sorted({start, stop, *(place for place in (begin, end) if start < place < stop)})
    total = dict.fromkeys(before, Fraction(0))
    for low, high in pairwise(edges):
        part = Fraction(0) if high <= begin else Fraction(1)
        if begin < high and low < end:
            of_ramp = [Fraction(place - begin, end - begin) for place in (low, high)]
            areas = [area(change.get("shape", "line"), one) for one in of_ramp]
            part = (areas[1] - areas[0]) / (of_ramp[1] - of_ramp[0])
        for name in total:
            total[name] += (before[name] + (after[name] - before[name]) * part) * (high - low)
    return {name: value / (stop - start) for name, value in total.items()}


def area(shape: str, part: Fraction) -> Fraction:
    """Section "Schedule": the area under a shape up to a part of the ramp, whose sine is rounded to 192 bits."""
    if shape == "line":
        return part**2 / 2
    with localcontext() as context:
        context.prec = 120
        pi = 4 * (4 * _arctan(Decimal(1) / 5) - _arctan(Decimal(1) / 239))
        angle = pi * part.numerator / part.denominator
        sine = term = angle
        for k in range(1, 200):
            term *= -angle * angle / ((2 * k) * (2 * k + 1))
            sine += term
        rounded = (sine / (2 * pi) * 2**192).to_integral_value()
    return part / 2 - Fraction(int(rounded), 2**192)


def _arctan(value: Decimal) -> Decimal:
    """By its series, to more than 120 digits."""
    total, power = value, value
    for k in range(1, 200):
        power *= -value * value
        total += power / (2 * k + 1)
    return total
