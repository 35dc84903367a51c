"""The recipe's `mixture` -> a tree of groups -> the share of each stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from math import prod

import msgspec
from msgspec.structs import replace

from torchmix.errors import RecipeError, key_path
from torchmix.recipe.amounts import parse_share, weights_of
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.fit import MOST_DENOMINATOR, fit_cells, power
from torchmix.recipe.streams import (
    BASE,
    CHILD,
    HasMixture,
    cells_in,
    cells_of,
    flats_of,
    leaves_of,
    members_of,
    places_of_members,
    possible_names,
    row_sets_of,
)
from torchmix.recipe.structs import MAX_NAME_BYTES, Cells, Group, InnerFlat, Share

# --- A tree of groups -> the share of each stream.
#
# Shares sum to 1; the children of a group divide the share of the group, so a change inside one group moves no stream
# outside of it. Cost: one pass over the tree, once per change of the shares; no step pays for it.
#
# A child that has run out gives its part to its siblings, and a group that has no child left gives its own part to its
# siblings in turn. A change names nodes by their path, joined by dots (`text.german`): the named children of a group
# get exactly what it says, and their siblings keep their ratios in the rest.

SEPARATOR = "."
"""Separates the names of a path; no name contains it."""


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that the children of a group are cells of."""

    properties: tuple[str, ...]
    """Sorted."""
    shares: tuple[Mapping[str, Fraction], ...]
    """The share of each value of each property; those of a property sum to 1."""
    values: Mapping[str, tuple[str, ...]]
    """Child to its value of each property."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A stream, or a group of nodes."""

    name: str
    """Name among its siblings; empty for the root."""
    weight: Fraction
    """At least 0. Its share of the group is the weight over the sum of its siblings' weights and its own."""
    children: tuple[Node, ...] = ()
    """Children of a group, by sorted name; empty for a stream."""
    exponent: Fraction | None = None
    """Exponent of a group whose children share by a power of their tokens, see `with_sizes`; it replaces weights."""
    grid: Grid | None = None
    """The cells of a group that has them as children; they share by the fit of `with_sizes`, which replaces weights."""

    @property
    def shares_by_size(self) -> bool:
        """Whether the shares of its children follow from their tokens, so that none can be set alone."""
        return self.exponent is not None or self.grid is not None


def group(
    name: str, weight: Fraction, children: Collection[Node], exponent: Fraction | None = None, grid: Grid | None = None
) -> Node:
    """A node with children, which stand by sorted name whatever the order in which they are given."""
    ordered = tuple(sorted(children, key=lambda node: node.name))
    return Node(name=name, weight=weight, children=ordered, exponent=exponent, grid=grid)


def with_sizes(node: Node, tokens: Mapping[str, int], where: str, *, nearest_cells: bool) -> Node:
    """The tree with weights in the groups that share by sizes.

    Args:
        node: The tree.
        tokens: Tokens of each stream.
        where: Path of keys of the tree, for errors.
        nearest_cells: Whether cells that cannot have their shares get the nearest ones that they can have.

    Raises:
        RecipeError: Shares of properties that the cells cannot have together.
    """
    below = [(child, f"{where}.{child.name}{'.children' if child.grid is None else ''}") for child in node.children]
    children = tuple(with_sizes(child, tokens, place, nearest_cells=nearest_cells) for child, place in below)
    if node.grid is not None:
        try:
            weights = _weights_of_cells(node.grid, tokens, nearest_cells=nearest_cells)
        except RecipeError as error:
            raise RecipeError(error.message, f"{where}.cells.shares") from None
        children = tuple(replace(child, weight=weights[child.name]) for child in children)
    if node.exponent is not None:
        powers = [power(sum(tokens[name] for name in streams_of(child)), node.exponent) for child in children]
        children = tuple(replace(child, weight=Fraction(p)) for child, p in zip(children, powers, strict=True))
    return replace(node, children=children)


def streams_of(root: Node) -> list[str]:
    """Names of the streams, sorted; a name that is in the tree twice is in the list twice."""
    if not root.children:
        return [root.name]
    return sorted(node.name for _, node in walk(root) if not node.children)


def walk(root: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every node below the root with its path, parents before children, siblings by name."""
    for node in root.children:
        place = f"{path}{SEPARATOR}{node.name}" if path else node.name
        yield place, node
        yield from walk(node, place)


def stream_shares(root: Node, gone: Collection[str] = ()) -> dict[str, Fraction]:
    """The share of each stream.

    Args:
        root: The tree.
        gone: Streams that have run out. They get 0; their siblings get their part, or the siblings of the group where
            the group has no other child left.

    Returns:
        Name to share, in [0, 1], for every stream. The sum is 1, or 0 if nothing is left.
    """
    shares: dict[str, Fraction] = {}
    _share_out(root, Fraction(1), frozenset(gone), shares)
    return shares


def with_shares(root: Node, changes: Mapping[str, Fraction]) -> Node:
    """The tree after a change: the named nodes have exactly these shares of their groups.

    Args:
        root: The tree.
        changes: Path to share of the group, in [0, 1].

    Returns:
        A tree in which named children have their shares, and their siblings keep their ratios in what is left.

    Raises:
        RecipeError: A path leads to no node (the error names the nearest one). Shares of one group sum to more than 1,
            to less where nothing else is in the group, or to 1 where others have a weight that they cannot keep.
    """
    paths = [path for path, _ in walk(root)]
    for path in changes:
        if path not in paths:
            raise RecipeError(f"the mixture has no {path!r}{nearest(path, paths)}")
    for path, node in walk(root):
        if node.shares_by_size and any(change.startswith(f"{path}{SEPARATOR}") for change in changes):
            raise RecipeError(f"the children of {path!r} share by their sizes, so none of them can be set")
    return replace(root, children=_changed(root, "", changes))


def _weights_of_cells(grid: Grid, tokens: Mapping[str, int], *, nearest_cells: bool) -> dict[str, Fraction]:
    """The weight of each cell of a group; those that differ in no property with shares have them by their tokens."""
    sizes: dict[tuple[str, ...], int] = {}
    for name, values in grid.values.items():
        sizes[values] = sizes.get(values, 0) + tokens[name]
    shares = fit_cells(sizes, grid.properties, grid.shares, may_miss=nearest_cells).shares
    weights = dict.fromkeys(grid.values, Fraction(0))
    for name, values in grid.values.items():
        if tokens[name]:
            weights[name] = shares[values] * tokens[name] / sizes[values]
    return weights


def _share_out(node: Node, share: Fraction, gone: frozenset[str], shares: dict[str, Fraction]) -> None:
    if not node.children:
        shares[node.name] = share
        return
    weights = [child.weight if _has_any(child, gone) else Fraction(0) for child in node.children]
    total = sum(weights, Fraction(0))
    for child, weight in zip(node.children, weights, strict=True):
        _share_out(child, share * weight / total if total else Fraction(0), gone, shares)


def _has_any(node: Node, gone: frozenset[str]) -> bool:
    """Whether a node has a stream that can give something."""
    if not node.children:
        return node.name not in gone
    return any(child.weight > 0 and _has_any(child, gone) for child in node.children)


def _changed(node: Node, path: str, changes: Mapping[str, Fraction]) -> tuple[Node, ...]:
    places = {child.name: f"{path}{SEPARATOR}{child.name}" if path else child.name for child in node.children}
    named = {name: changes[place] for name, place in places.items() if place in changes}
    weights = {child.name: child.weight for child in node.children}
    if named:
        weights = _with_named(path, weights, named)
    return tuple(
        replace(child, weight=weights[child.name], children=_changed(child, places[child.name], changes))
        for child in node.children
    )


def _with_named(path: str, weights: Mapping[str, Fraction], named: Mapping[str, Fraction]) -> dict[str, Fraction]:
    where = f"the group {path!r}" if path else "the mixture"
    rest = 1 - sum(named.values(), Fraction(0))
    others = {name: weight for name, weight in weights.items() if name not in named}
    total = sum(others.values(), Fraction(0))
    if rest < 0:
        raise RecipeError(f"the shares set in {where} sum to {float(1 - rest):.6g}, which is more than 1")
    if rest > 0 and not total:
        raise RecipeError(f"the shares set in {where} leave {float(rest):.6g}, and nothing else there has a share")
    return {**{name: rest * weight / total for name, weight in others.items() if total}, **named} | {
        name: Fraction(0) for name in others if not total
    }


# --- What the cells of a group may be, and where each lies among its properties.
#
# A cell is a stream of its own, named GROUP/BASE/VALUE/..., with the values by sorted property, so the order of keys
# means nothing; the shares of each property are exact and sum to 1. Cost: microseconds a cell.

MOST_CELLS = 4096
"""Most cells of a group: each is a stream, with some windows in memory."""


def grid_of(name: str, cells: Cells, where: str) -> Grid:
    """The cells of a group and their properties.

    Args:
        name: The group's.
        cells: As the recipe has them; `check_cells` has passed them.
        where: Path of keys of `cells`.

    Raises:
        RecipeError: Shares are malformed, or do not sum to 100 %.
    """
    properties = tuple(sorted(cells.shares))
    shares = tuple(_shares_of(cells, each, f"{where}.shares.{each}") for each in properties)
    values = {}
    for cell in cells_in(name, cells):
        of_property = dict(cell.values) | {BASE: cell.base}
        values[cell.name] = tuple(of_property[each] for each in properties)
    return Grid(properties=properties, shares=shares, values=values)


def check_cells(part: HasMixture, where: str) -> None:
    """Check all cells of a mixture and of its changes.

    Args:
        part: A recipe, an evaluation of it, or a part.
        where: Path of keys of the part.

    Raises:
        RecipeError: Cells of nothing, of what does not exist, or of too many values; no property, or one without
            values; a group with other keys beside them, with a name that is taken, or with other cells elsewhere.
    """
    found: dict[str, list[list[str]]] = {}
    for path, name, cells in cells_of(part):
        place = key_path(where, path)
        if CHILD in name or name in {*part.sources, *part.selections}:
            reason = f"a {CHILD!r} separates a source from its child" if CHILD in name else "a source has that name"
            raise RecipeError(f"{name!r} cannot name a group of cells: {reason}", place)
        _check_properties(cells, f"{place}.cells.shares")
        _check_of(part, cells, f"{place}.cells.of")
        for cell in cells_in(name, cells):
            if len(cell.name.encode()) > MAX_NAME_BYTES:
                message = f"the cell {cell.name!r} has a name of more than {MAX_NAME_BYTES} bytes; shorten its parts"
                raise RecipeError(message, f"{place}.cells.shares")
        key = [sorted(cells.of), sorted(cells.shares)]
        if found.setdefault(name, key) != key:
            message = f"the group {name!r} has cells of other sources or properties elsewhere; give it another name"
            raise RecipeError(message, place)


def check_keys_beside_cells(value: Group, where: str) -> None:
    """Refuse what a group of cells cannot have beside them; `where` is the group's path of keys."""
    for key in ("children", "flat", "proportional", "max_epochs", "on_exhausted"):
        if getattr(value, key) != getattr(Group(), key):
            message = "a group of cells has no such key; sources and selections have bounds on epochs"
            raise RecipeError(message, f"{where}.{key}")


def _check_of(part: HasMixture, cells: Cells, where: str) -> None:
    if not cells.of:
        raise RecipeError("names no source", where)
    row_sets = row_sets_of(part)
    known = {*part.sources, *part.selections, *(name for name, one in row_sets.items() if one.cell is None)}
    with_rows = {one.cell.base for one in row_sets.values() if one.cell is not None}
    for number, name in enumerate(cells.of):
        if name not in with_rows:
            names = sorted({*known, *possible_names(part)})
            message = f"there is no source {name!r}{nearest(name, names)}; sources are {listed(names)}"
            raise RecipeError(message, f"{where}[{number}]")
        if name in cells.of[:number]:
            raise RecipeError(f"the source {name!r} stands there twice", f"{where}[{number}]")


def _check_properties(cells: Cells, where: str) -> None:
    if not set(cells.shares) - {BASE}:
        message = "name a property of the rows, as `lang`; shares of sources alone stand under `children`"
        raise RecipeError(message, where)
    for name, values in cells.shares.items():
        if not values:
            raise RecipeError("names no value", f"{where}.{name}")
        for value in values:
            if not value or not value.isprintable() or len(value.encode()) > MAX_NAME_BYTES:
                message = f"{value!r} is no value with a share: printable text of at most {MAX_NAME_BYTES} bytes"
                raise RecipeError(message, f"{where}.{name}")
    if BASE in cells.shares and set(cells.shares[BASE]) != set(cells.of):
        message = f"has {listed(sorted(cells.shares[BASE]))}, and the cells are of {listed(sorted(cells.of))}"
        raise RecipeError(message, f"{where}.{BASE}")
    count = len(cells.of) * prod(len(values) for name, values in cells.shares.items() if name != BASE)
    if count > MOST_CELLS:
        raise RecipeError(f"{count} cells, at most {MOST_CELLS}; leave a property or values out", where)


def _shares_of(cells: Cells, name: str, where: str) -> dict[str, Fraction]:
    weights = weights_of(cells.shares[name], where)
    for value, weight in weights.items():
        if not weight:
            raise RecipeError("has the share 0; leave it out, and its rows are in no cell", f"{where}.{value}")
    total = sum(weights.values(), Fraction(0))
    return {value: weights[value] / total for value in sorted(weights)}


# --- What a flat of a mixture may be.
#
# A flat has a name of its own, and each of its members once; bounds on epochs stand on the flat, since it has the one
# order that they count. Cost: microseconds a member.


def check_flats(part: HasMixture, where: str) -> None:
    """Check all flats of a mixture and of its changes.

    Args:
        part: A recipe, an evaluation of it, or a part.
        where: Path of keys of the part.

    Raises:
        RecipeError: A member does not exist, stands there twice or has a bound of its own; a flat has children, no
            member, the name of something else, or differs from another one of its name.
    """
    found: dict[str, Group] = {}
    for path, name, flat in flats_of(part):
        place = key_path(where, path)
        for key in ("children", "proportional"):
            if getattr(flat, key) is not None:
                raise RecipeError("a flat has no such key; its members stand under `flat`", f"{place}.{key}")
        if CHILD in name or name in {*part.sources, *part.selections}:
            reason = f"a {CHILD!r} separates a source from its child" if CHILD in name else "a source has that name"
            raise RecipeError(f"{name!r} cannot name a flat: {reason}", place)
        if flat.max_epochs is not None and flat.max_epochs < 1:
            raise RecipeError(f"{flat.max_epochs} is out of range; it must be at least 1", f"{place}.max_epochs")
        _check_members(part, flat, place)
        bare = found.setdefault(name, flat)
        if (sorted(members_of(bare)), bare.max_epochs, bare.on_exhausted) != (
            sorted(members_of(flat)),
            flat.max_epochs,
            flat.on_exhausted,
        ):
            raise RecipeError(f"the flat {name!r} has other members or bounds elsewhere; give it another name", place)


def _check_members(part: HasMixture, flat: Group, where: str) -> None:
    row_sets, leaves = row_sets_of(part), leaves_of(part)
    _check_inner_flats(flat, f"{where}.flat")
    found = set[str]()
    allowing: dict[str, str] = {}
    for place, member in places_of_members(flat, f"{where}.flat"):
        if member not in row_sets:
            names = sorted({*row_sets, *possible_names(part)})
            message = f"there is no source {member!r}{nearest(member, names)}; sources are {listed(names)}"
            raise RecipeError(message, place)
        if member in found:
            raise RecipeError(f"the source {member!r} stands there twice", place)
        found.add(member)
        rows = row_sets[member]
        if rows.max_epochs is not None and member not in leaves:
            raise RecipeError(
                f"{member!r} has max_epochs {rows.max_epochs}, and its rows come in the order of the flat; write "
                "max_epochs beside `flat`, and remove it there",
                place,
            )
        if rows.overlap == "allow" and rows.source in allowing:
            raise RecipeError(
                f"{member!r} may have rows that {allowing[rows.source]!r} has, too, and a flat has each row once; "
                "remove overlap: allow",
                place,
            )
        allowing[rows.source] = member


def _check_inner_flats(flat: Group | InnerFlat, where: str) -> None:
    if not flat.flat:
        raise RecipeError("names no source", where)
    for number, member in enumerate(flat.flat):
        if not isinstance(member, InnerFlat):
            continue
        _check_inner_flats(member, f"{where}[{number}].flat")


# --- The recipe's `mixture` -> the tree.
#
# Shares are exact; the children of a group have shares that sum to 1, or numbers as ratios, never a mix of both; every
# source is in the tree once. Cost: microseconds a name.


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
