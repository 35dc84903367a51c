"""The streams of a mixture: what holds a share, and draws from an order of its own; and the rows that they draw.

A stream has its own position, debt, epochs and bound on them; where its rows lie is the matter of its sources; a source
needs no share of its own where a selection, a child or cells of it are there. Cost: microseconds a name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from torchmix.recipe.structs import Cells, Change, Group, InnerFlat, Quantiles, Selection, Share, Source

CHILD = "/"
"""Stands between a source and its child; no name that a user writes for a source contains it."""
BASE = "source"
"""The property of cells whose values are the names that they are cells of."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """What holds a share of the mixture."""

    name: str
    """Keys its order."""
    members: tuple[str, ...]
    """Names of the row sets that it draws from, sorted."""
    sources: tuple[str, ...]
    """Names of the sources that these rows lie in, sorted."""
    is_flat: bool
    """Whether one permutation goes over the rows of all members; a stream that is no flat has one member."""
    max_epochs: int | None
    """Epochs that it gives, after which it has run out; None: no bound."""
    on_exhausted: Literal["error", "renormalise"]
    """After `max_epochs`: stop, or give its share to its siblings."""
    is_cell: bool = False
    """Whether it is a cell, which may have no rows; it then has no share either."""

    @property
    def is_source(self) -> bool:
        """Whether it has the name and the rows of a source; some may be held out."""
        return not self.is_flat and self.sources == (self.name,)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cell lies."""

    group: str
    """The group that it is a child of."""
    base: str
    """The source, selection or child whose rows it has."""
    values: tuple[tuple[str, str], ...]
    """Property and value, by sorted property; of all properties with shares but `source`."""

    @property
    def name(self) -> str:
        """The stream's: GROUP/BASE/VALUE/..., where a value has `%2F` for a slash, and `%25` for a percent sign."""
        values = (value.replace("%", "%25").replace(CHILD, "%2F") for _, value in self.values)
        return CHILD.join((self.group, self.base, *values))


class RowSet(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one source that hold a share."""

    source: str
    """Where its rows lie."""
    where: str | None = None
    """The expression of a selection."""
    child: str | None = None
    """Name of a child of a source that is cut, without that of the source."""
    cell: Cell | None = None
    """The cell that it is, if it is one: it has the rows that `where` and `child` leave and that lie in the cell."""
    overlap: Literal["exclude", "allow"] = "exclude"
    """As that of a selection; a source and its children say nothing."""
    max_epochs: int | None = None
    """Passes over its rows in training; None: no bound."""
    on_exhausted: Literal["error", "renormalise"] = "error"
    """What follows after them."""


class HasMixture(Protocol):
    """A recipe, its validation or test, or a part of it."""

    @property
    def sources(self) -> Mapping[str, Source]:
        """Sources by name."""

    @property
    def selections(self) -> Mapping[str, Selection]:
        """Selections by name."""

    @property
    def mixture(self) -> Mapping[str, Share | Group]:
        """Shares at the start."""


def row_sets_of(part: HasMixture) -> dict[str, RowSet]:
    """What may have a share in a part, by sorted name, whether it has one or lacks it by mistake.

    Children of a source that is cut are there where the mixture or a change of it names them. So are all cells. The
    catalog knows whether there are such rows.
    """
    named = {*_names(part), *(member for _, _, flat in flats_of(part) for member in members_of(flat))}
    cells = {cell.name: cell for _, group, content in cells_of(part) for cell in cells_in(group, content)}
    bases = {cell.base for cell in cells.values()}
    children = {name: parts for name in {*named, *bases} if (parts := _child(name, part.sources)) is not None}
    rests = {selection.source for selection in part.selections.values()} | {source for source, _ in children.values()}
    rests |= bases
    row_sets: dict[str, RowSet] = {}
    for name in part.sources:
        if name in named or name not in rests:
            row_sets[name] = _all_rows(part, name)
    for name, one in part.selections.items():
        row_sets[name] = RowSet(
            source=one.source,
            where=one.where,
            overlap=one.overlap,
            max_epochs=one.max_epochs,
            on_exhausted=one.on_exhausted,
        )
    for name, (base, child) in children.items():
        cut = part.sources[base]
        row_sets[name] = RowSet(source=base, child=child, max_epochs=cut.max_epochs, on_exhausted=cut.on_exhausted)
    of_bases = {**{name: row_sets.get(name, _all_rows(part, name)) for name in bases & set(part.sources)}, **row_sets}
    for name in bases - named - set(part.sources):  # has no share of its own, and lacks none
        row_sets.pop(name, None)
    for name, cell in cells.items():
        if cell.base in of_bases:
            row_sets[name] = replace(of_bases[cell.base], cell=cell)
    return {name: row_sets[name] for name in sorted(row_sets)}


def streams_of(part: HasMixture) -> dict[str, Stream]:
    """The streams of a part, by sorted name: its row sets, less those that only flats draw from; and the flats."""
    row_sets, leaves, found = row_sets_of(part), set(_names(part)), dict[str, Stream]()
    in_flats = set[str]()
    for _, name, flat in flats_of(part):
        members = sorted(members_of(flat))
        in_flats.update(members)
        found[name] = Stream(
            name=name,
            members=tuple(members),
            sources=tuple(sorted({row_sets[member].source for member in members if member in row_sets})),
            is_flat=True,
            max_epochs=flat.max_epochs,
            on_exhausted=flat.on_exhausted,
        )
    for name, rows in row_sets.items():
        if name in leaves or name not in in_flats:
            found[name] = Stream(
                name=name,
                members=(name,),
                sources=(rows.source,),
                is_flat=False,
                max_epochs=rows.max_epochs,
                on_exhausted=rows.on_exhausted,
                is_cell=rows.cell is not None,
            )
    return {name: found[name] for name in sorted(found)}


def leaves_of(part: HasMixture) -> set[str]:
    """Names of the row sets that have a share of their own, at the start or after a change."""
    return set(_names(part))


def flats_of(part: HasMixture) -> Iterator[tuple[str, str, Group]]:
    """Path of keys, name and content of each flat of a mixture and of its changes."""
    yield from ((path, name, one) for path, name, one in _groups_of(part) if one.flat is not None)


def members_of(flat: Group | InnerFlat) -> list[str]:
    """Names of the members of a flat, in the order of the file; a flat inside it stands for its members.

    A flat orders the rows of all its members by one permutation, in which the size of a member is its only weight. So
    members of an inner flat are like any others, and there is nothing that the inner list could add.
    """
    return [name for _, name in places_of_members(flat)]


def places_of_members(flat: Group | InnerFlat, where: str = "flat") -> Iterator[tuple[str, str]]:
    """Path of keys below the flat, and name, of each of `members_of`."""
    for number, member in enumerate(flat.flat or ()):
        if isinstance(member, InnerFlat):
            yield from places_of_members(member, f"{where}[{number}].flat")
        else:
            yield f"{where}[{number}]", member


def cells_of(part: HasMixture) -> Iterator[tuple[str, str, Cells]]:
    """Path of keys, name and content of each group of cells of a mixture and of its changes."""
    yield from ((path, name, one.cells) for path, name, one in _groups_of(part) if one.cells is not None)


def cells_in(group: str, cells: Cells) -> Iterator[Cell]:
    """The cells of a group, whether there are such rows or not."""
    properties = sorted(set(cells.shares) - {BASE})
    for base, *values in product(sorted(set(cells.of)), *(sorted(cells.shares[name]) for name in properties)):
        yield Cell(group=group, base=base, values=tuple(zip(properties, values, strict=True)))


def _groups_of(part: HasMixture) -> Iterator[tuple[str, str, Group]]:
    """Path of keys, name and content of each group of a mixture and of its changes."""
    yield from _groups_in(part.mixture, "mixture")
    changes: tuple[Change, ...] = getattr(part, "schedule", ())
    for number, change in enumerate(changes):
        yield from _groups_in(change.mixture or {}, f"schedule[{number}].mixture")


def _groups_in(children: Mapping[str, Share | Group] | Collection[str], where: str) -> Iterator[tuple[str, str, Group]]:
    if not isinstance(children, Mapping):
        return
    for name, value in children.items():
        if isinstance(value, Group):
            yield f"{where}.{name}", name, value
            yield from _groups_in(value.children or {}, f"{where}.{name}.children")


def _all_rows(part: HasMixture, source: str) -> RowSet:
    one = part.sources[source]
    return RowSet(source=source, max_epochs=one.max_epochs, on_exhausted=one.on_exhausted)


def possible_names(part: HasMixture) -> list[str]:
    """Names that may have a share, as far as the recipe tells them: not the folders of `split_by: dir`."""
    quantiles = [
        f"{name}{CHILD}q{number}"
        for name, source in part.sources.items()
        if isinstance(source.split_by, Quantiles)
        for number in range(1, source.split_by.quantiles + 1)
    ]
    return [*part.sources, *part.selections, *quantiles]


def _child(name: str, sources: Mapping[str, Source]) -> tuple[str, str] | None:
    """Source and child of a name, where the source is cut into such children."""
    base, sign, child = name.partition(CHILD)
    cut = sources[base].split_by if sign and base in sources else None
    if cut is None or not child or (isinstance(cut, Quantiles) and name not in _quantile_names(base, cut)):
        return None
    return base, child


def _quantile_names(base: str, cut: Quantiles) -> Collection[str]:
    return {f"{base}{CHILD}q{number}" for number in range(1, cut.quantiles + 1)}


def _names(part: HasMixture) -> Iterator[str]:
    yield from _names_in(part.mixture)
    changes: tuple[Change, ...] = getattr(part, "schedule", ())
    for change in changes:
        yield from _names_in(change.mixture or {})


def _names_in(children: Mapping[str, Share | Group] | Collection[str]) -> Iterator[str]:
    for name in children:
        value = children[name] if isinstance(children, Mapping) else None
        if isinstance(value, Group):
            yield from _names_in(value.children or {})
        else:
            yield name
