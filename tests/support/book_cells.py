"""Cells and hold-outs, written a second time from docs/formats.md, in plain integers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction


def fit(tokens: Mapping[tuple[str, ...], int], shares: Sequence[Mapping[str, Fraction]]) -> dict[tuple[str, ...], int]:
    """Section "Cells": the number p of each place, by its values in the order of sorted properties."""
    places = sorted(place for place, n in tokens.items() if n > 0)
    total = sum(tokens[place] for place in places)
    p = {place: max(1, tokens[place] * 2**96 // total) for place in places}
    wanted = [{value: int(share * 2**96) for value, share in each.items()} for each in shares]
    while True:
        for at, each in enumerate(wanted):
            for value in sorted(each):
                whole = sum(p[place] for place in places if place[at] == value)
                for place in places:
                    if place[at] == value:
                        p[place] = max(1, p[place] * each[value] // whole)
        if all(
            abs(sum(p[place] for place in places if place[at] == value) - goal) <= 2**56
            for at, each in enumerate(wanted)
            for value, goal in each.items()
        ):
            return p


def row_hash(text: str) -> int:
    """Section "Selections": the first 64 bits of the SHA-256 of a row's id, or of its place."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def part_of_row(text: str, *, validation: Fraction, test: Fraction) -> str:
    """Section "Selections": the part that has a row."""
    hash = Fraction(row_hash(text), 2**64)
    return "validation" if hash < validation else "test" if hash >= 1 - test else "train"
