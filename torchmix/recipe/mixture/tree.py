"""A tree of groups -> the share of each stream.

In: a tree of nodes, each with its weight among its siblings. Out: the exact share of every stream, by name. Must hold:
shares sum to 1; the children of a group divide the share of the group, so a change inside one group moves no stream
outside of it. Cost: one pass over the tree, once per change of the shares; no step pays for it.

A child that has run out gives its part to its siblings, and a group that has no child left gives its own part to its
siblings in turn. A change names nodes by their path, joined by dots (`text.german`): the named children of a group get
exactly what it says, and their siblings keep their ratios in the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction

import msgspec
from msgspec.structs import replace

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.mixture.fit import fit_cells
from torchmix.recipe.mixture.powers import power

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


def with_sizes(node: Node, tokens: Mapping[str, int], where: str, *, nearest_cells: bool = False) -> Node:
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


def by_sizes(root: Node) -> bool:
    """Whether some group shares by sizes."""
    return any(node.shares_by_size for _, node in walk(root))


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
