"""What `hold_out` says: which rows of a source a part has, and the mixture of what is held out.

In: `hold_out` of a recipe. Out: for each part and source a band of hashes, and a mixture of the streams that have rows
in it. Must hold: bands of the parts of a recipe do not overlap and fill [0, 1), so a row is in exactly one part;
`validation` has the lowest hashes and `test` the highest, so that each can grow without moving the other. Cost: none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.shares import numerators, parse_fraction, parse_share
from torchmix.recipe.source.documents import PARTS
from torchmix.recipe.streams import BASE, members_of
from torchmix.recipe.structs import Cells, Group, Recipe, Share

Band = tuple[str, str]
"""Bounds (start, stop) of hashes, as exact parts of all of them, `1/100`; the stop is not included. They are text since
a band is in a `Part`, and a part goes to workers in a message."""


def bands_of(recipe: Recipe, part: str) -> dict[str, Band]:
    """The hashes that a part has of each source from which some rows are held out; other sources are not in it."""
    held = recipe.hold_out or {}
    bands: dict[str, Band] = {}
    for name in sorted({name for sources in held.values() for name in sources}):
        low, high = (_part_held(held, which, name) for which in PARTS[1:])
        of_part = {"train": (low, 1 - high), "validation": (Fraction(0), low), "test": (1 - high, Fraction(1))}
        start, stop = of_part[part]
        if start < stop:
            bands[name] = (str(start), str(stop))
    return bands


def check_hold_out(recipe: Recipe) -> None:
    """Check what is held out, against the rest of a recipe.

    Raises:
        RecipeError: The first fault.
    """
    for part, sources in (recipe.hold_out or {}).items():
        where = f"hold_out.{part}"
        if part not in PARTS[1:]:
            raise RecipeError(f"{part!r} is not one of {', '.join(PARTS[1:])}{nearest(part, PARTS[1:])}", where)
        if recipe.split is not None:
            raise RecipeError("split cuts the rows of all sources; remove one of the two", where)
        if getattr(recipe, part) is not None:
            raise RecipeError(f"{part} has sources of its own here; remove one of the two", where)
        if not sources:
            raise RecipeError("names no source", where)
        for name, text in sources.items():
            if name not in recipe.sources:
                hint = nearest(name, recipe.sources)
                raise RecipeError(f"there is no such source{hint}; rows of sources are held out", f"{where}.{name}")
            if not 0 < parse_fraction(text, f"{where}.{name}") < 1:
                raise RecipeError(f"{text} is out of range; it must be above 0% and below 100%", f"{where}.{name}")
    for name in recipe.sources:
        if sum(_part_held(recipe.hold_out or {}, part, name) for part in PARTS[1:]) >= 1:
            raise RecipeError(f"all rows of {name!r} are held out; leave some for training", "hold_out")


def only(
    children: Mapping[str, Share | Group] | Collection[str], keep: Callable[[str], bool]
) -> dict[str, Share | Group] | tuple[str, ...]:
    """The children of a group without what is not kept; those that stay keep their ratios.

    Args:
        children: As a recipe has them.
        keep: Whether a name, which is no group's, stays.
    """
    if not isinstance(children, Mapping):
        return tuple(name for name in children if keep(name))
    left: dict[str, Share | Group] = {}
    for name, value in children.items():
        if isinstance(value, Group) and value.cells is not None:
            if (cells := _cells_only(value.cells, keep)) is not None:
                left[name] = value if cells == value.cells else msgspec.structs.replace(value, cells=cells)
        elif isinstance(value, Group):
            key = "children" if value.flat is None else "flat"
            inner = only(value.children or {} if value.flat is None else members_of(value), keep)
            if inner:
                left[name] = value if inner == getattr(value, key) else msgspec.structs.replace(value, **{key: inner})
        elif keep(name):
            left[name] = value
    return left if len(left) == len(children) else _as_ratios(left)


def _cells_only(cells: Cells, keep: Callable[[str], bool]) -> Cells | None:
    """Cells of what is kept; None where nothing is."""
    of = tuple(name for name in cells.of if keep(name))
    if not of:
        return None
    shares = dict(cells.shares)
    if BASE in shares and len(of) < len(cells.of):
        left: dict[str, Share | Group] = {name: share for name, share in shares[BASE].items() if name in of}
        shares[BASE] = {name: share for name, share in _as_ratios(left).items() if not isinstance(share, Group)}
    return Cells(of=of, shares=shares)


def _as_ratios(children: Mapping[str, Share | Group]) -> dict[str, Share | Group]:
    """Children with ratios in place of percentages, which would sum to 100% no more.

    Ratios are whole numbers, or exact parts as text where a number has more than 64 bits and fits in no message.
    """
    shares = {name: value.share if isinstance(value, Group) else value for name, value in children.items()}
    if any(share is None for share in shares.values()):  # a group that shares by sizes
        return dict(children)
    weights: Sequence[Share]
    weights, _ = numerators(parse_share(share, name) for name, share in shares.items() if share is not None)
    if max(weights, default=0) >= 1 << 63:
        total = sum(weights)
        weights = [f"{part.numerator}/{part.denominator}" for part in (Fraction(one, total) for one in weights)]
    return {
        name: msgspec.structs.replace(value, share=weight) if isinstance(value, Group) else weight
        for (name, value), weight in zip(children.items(), weights, strict=True)
    }


def _part_held(held: Mapping[str, Mapping[str, str]], part: str, source: str) -> Fraction:
    text = held.get(part, {}).get(source)
    return Fraction(0) if text is None else parse_fraction(text, f"hold_out.{part}.{source}")
