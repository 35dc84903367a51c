"""A part of a recipe -> the views that it needs of each source.

In: a part. Out: for each source of which not every stream has all rows: the row sets that share it, and a digest of all
that the recipe says of them. Must hold: equal digests give equal rows from equal data. Cost: microseconds a source.
"""

from __future__ import annotations

import hashlib
import json

import msgspec

from torchmix.recipe.held_out import Band
from torchmix.recipe.parts import Part
from torchmix.recipe.source.format import paths_of
from torchmix.recipe.source.properties import columns_of, path_properties_of
from torchmix.recipe.streams import RowSet, row_sets_of
from torchmix.recipe.structs import Source

VIEWS_FORMAT = 1
"""Version of the rules by which views choose rows; part of every definition."""


class SourceViews(msgspec.Struct, frozen=True, kw_only=True):
    """The views that a part needs of one source."""

    name: str
    """The source."""
    source: Source
    """What the recipe says of it."""
    row_sets: dict[str, RowSet]
    """All that has a share of its rows, by sorted name; maybe the source itself."""
    band: Band | None
    """The hashes of its rows that the part has; None: all."""

    @property
    def definition(self) -> str:
        """16 hex digits over all that decides the rows, beside the data."""
        source = self.source
        cells = {name: [one.cell.base, one.cell.values] for name, one in self.row_sets.items() if one.cell is not None}
        content = {
            "format": VIEWS_FORMAT,
            "sets": {name: [one.where, one.child, one.overlap] for name, one in self.row_sets.items()},
            "band": None if self.band is None else [source.id, *self.band],
            "columns": columns_of(source),
            "paths": path_properties_of(source),
            "split_by": msgspec.to_builtins(source.split_by),
            "patterns": paths_of(source),
            **({"cells": cells} if cells else {}),
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


class PartViews(msgspec.Struct, frozen=True, kw_only=True):
    """The views that a part needs."""

    part: str
    """The part's name."""
    sources: dict[str, SourceViews]
    """By source, sorted; those without views are not in it."""
    deny: tuple[str, ...] = ()
    """Paths of deny-lists."""


def views_of(part: Part) -> PartViews:
    """The views that a part needs."""
    by_source: dict[str, dict[str, RowSet]] = {}
    for name, one in row_sets_of(part).items():
        by_source.setdefault(one.source, {})[name] = one
    wanted = {
        source: SourceViews(name=source, source=part.sources[source], row_sets=row_sets, band=part.bands.get(source))
        for source, row_sets in sorted(by_source.items())
        if source in part.bands or list(row_sets) != [source]
    }
    return PartViews(part=part.name, sources=wanted, deny=part.deny)
