"""The recipe's `mixture` -> the tree.

In: names with shares, and groups of them. Out: `tree.Node`, whose leaves are sources or rows of them. Must hold: shares
are exact; the children of a group have shares that sum to 1, or numbers as ratios, never a mix of both; every source is
in the tree once. Cost: microseconds a name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from itertools import pairwise

from torchmix.errors import RecipeError, key_path
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.mixture.cells import check_keys_beside_cells, grid_of
from torchmix.recipe.mixture.powers import MOST_DENOMINATOR
from torchmix.recipe.mixture.tree import SEPARATOR, Node, group, streams_of, walk
from torchmix.recipe.shares import parse_share, weights_of
from torchmix.recipe.structs import Group, Share


def tree_of(
    mixture: Mapping[str, Share | Group],
    sources: Collection[str],
    where: str,
    *,
    may_lack: bool,
    known: Collection[str] = (),
) -> Node:
    """The tree of a mixture.

    Args:
        mixture: As the recipe has it.
        sources: Names of what may have a share, and must have one: sources, and selections of their rows.
        where: Path of keys of the mixture, for errors.
        may_lack: Whether a source may have no share, because a schedule gives it or took it.
        known: Names that an error suggests beside these.

    Raises:
        RecipeError: A name is no source or is there twice, a source has no share, or shares are malformed or do not
            fit together.
    """
    root = _group("", Fraction(1), mixture, where)
    for path, node in walk(root):
        if not node.children and node.name not in sources:
            place = f"{where}.{path}"
            names = sorted({*sources, *known})
            message = f"there is no such source{nearest(node.name, names)}; sources are {listed(names)}"
            raise RecipeError(message, place)
    names = streams_of(root)
    for name, after in pairwise(names):
        if name == after:
            raise RecipeError(f"the source {name!r} stands there twice; a source has one share", where)
    for name in sorted(set(sources) - set(names)):
        if not may_lack:
            message = f"the source {name!r} has no share; give it one, or remove the source"
            raise RecipeError(message, f"{where}.{name}")
    return root


def _group(
    name: str,
    weight: Fraction,
    children: Mapping[str, Share | Group] | Collection[str],
    where: str,
    exponent: Fraction | None = None,
) -> Node:
    if not children:
        raise RecipeError("names no source", where)
    for child in children:
        if SEPARATOR in child:
            raise RecipeError(f"the name {child!r} holds a dot, which separates the names of a path", where)
    if exponent is not None:
        return group(name, weight, [_sized(child, children, where) for child in children], exponent)
    if not isinstance(children, Mapping):
        raise RecipeError("a list of names has no shares; write NAME: SHARE, or add `proportional: 1`", where)
    shares = {child: _share_of(value, f"{where}.{child}") for child, value in children.items()}
    weights = weights_of(shares, where)
    return group(name, weight, [_node(child, weights[child], value, where) for child, value in children.items()])


def _sized(child: str, children: Mapping[str, Share | Group] | Collection[str], where: str) -> Node:
    """A child of a group that shares by sizes."""
    value = children[child] if isinstance(children, Mapping) else None
    if value is None:
        return Node(name=child, weight=Fraction(1))
    if isinstance(value, Group) and value.share is None:
        return _node(child, Fraction(1), value, where)
    raise RecipeError(
        "has a share of its own in a group that shares by sizes; remove one of the two", f"{where}.{child}"
    )


def _node(name: str, weight: Fraction, value: Share | Group, where: str) -> Node:
    if not isinstance(value, Group):
        return Node(name=name, weight=weight)
    place = f"{where}.{name}"
    if value.flat is not None:
        return Node(name=name, weight=weight)
    if value.cells is not None:
        check_keys_beside_cells(value, place)
        grid = grid_of(name, value.cells, key_path(place, "cells"))
        return group(name, weight, [Node(name=cell, weight=Fraction(1)) for cell in grid.values], grid=grid)
    if value.children is None:
        message = "the key is required and missing, in a group that has neither `flat` nor `cells`"
        raise RecipeError(message, key_path(place, "children"))
    for key in ("max_epochs", "on_exhausted"):
        if getattr(value, key) != getattr(Group(), key):
            raise RecipeError("a group has no such bound; sources, selections and flats have", f"{place}.{key}")
    exponent = None
    if value.proportional is not None:
        exponent = _exponent(value.proportional, key_path(place, "proportional"))
    return _group(name, weight, value.children, key_path(place, "children"), exponent)


def _exponent(value: str | int | float, where: str) -> Fraction:
    exponent = parse_share(value, where)
    if exponent > 1 or exponent.denominator > MOST_DENOMINATOR:
        raise RecipeError(f"{value!r} is not in [0, 1], with at most three decimals: 1 is natural size", where)
    return exponent


def _share_of(value: Share | Group, where: str) -> Share:
    if not isinstance(value, Group):
        return value
    if value.share is None:
        raise RecipeError("the key is required and missing", key_path(where, "share"))
    return value.share
