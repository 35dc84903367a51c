"""Rows that are in no cell of a group, and so are never trained on.

In: a part with its open catalog. Out: a note for each source, selection or child with such rows and no other
share. Must hold: the counts
are those of the index. Cost: one read of the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.store import Catalog
from torchmix.cli.check.findings import Finding, Level
from torchmix.cli.terminal import count_text
from torchmix.recipe.parts import Part
from torchmix.recipe.streams import BASE, Cell, cells_of, row_sets_of


def cell_findings(part: Part, catalog: Catalog) -> Iterator[Finding]:
    """A note for each source, selection or child that has rows in no cell of a group."""
    groups = {name: (path, cells) for path, name, cells in cells_of(part)}
    if not groups:
        return
    entries, row_sets = read_manifest(catalog.directory).views[part.name], row_sets_of(part)
    one_of_each: dict[tuple[str, str], Cell] = {}
    for one in row_sets.values():
        if one.cell is not None and one.cell.base not in row_sets:  # else these rows have that share
            one_of_each.setdefault((one.cell.group, one.cell.base), one.cell)
    for (group, base), cell in one_of_each.items():
        path, cells = groups[group]
        if count := entries[cell.name].in_no_cell:
            wanted = "; ".join(
                f"{name} is none of {', '.join(sorted(values))}"
                for name, values in sorted(cells.shares.items())
                if name != BASE
            )
            message = (
                f"{count_text(count)} rows of {base} are in no cell, since their {wanted}; they are not trained on"
            )
            yield Finding(level=Level.NOTE, where=f"{path}.cells", message=message)
