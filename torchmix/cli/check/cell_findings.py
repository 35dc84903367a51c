"""Rows that are in no cell of a group, or in no child that the mixture names, and so are never trained on.

In: a part with its open catalog. Out: a note for each source, selection or child with such rows and no other
share. Must hold: the counts are those of the index. Cost: one read of the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.store import Catalog
from torchmix.catalog.views.folders import child_folder
from torchmix.cli.check.findings import Finding, Level
from torchmix.cli.terminal import count_text
from torchmix.recipe.build import listed
from torchmix.recipe.parts import Part
from torchmix.recipe.source.format import paths_of
from torchmix.recipe.streams import BASE, CHILD, Cell, cells_of, row_sets_of
from torchmix.recipe.structs import Quantiles

SHOWN_CHILDREN = 10
"""Children that a note names."""


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


def child_findings(part: Part, catalog: Catalog) -> Iterator[Finding]:
    """A note for each source that is cut, of whose children the mixture names some, and neither all nor the rest."""
    row_sets = row_sets_of(part)
    for name, source in part.sources.items():
        own = [one for one in row_sets.values() if one.source == name]
        named = {one.child for one in own if one.child is not None}
        has_rest = any(one.child is None and one.where is None for one in own)
        if source.split_by is None or not named or has_rest:
            continue
        where, what = f"sources.{name}.split_by", ""
        if isinstance(source.split_by, Quantiles):
            numbers = range(1, source.split_by.quantiles + 1)
            left = [f"q{number}" for number in numbers if f"q{number}" not in named]
        else:
            rows: dict[str, int] = {}
            for file in catalog.sources[name].files:
                child = child_folder(paths_of(source), file.path, where)
                rows[child] = rows.get(child, 0) + file.num_rows
            left = sorted(child for child, count in rows.items() if count and child not in named)
            what = f", {count_text(sum(rows[child] for child in left))} rows"
        if left:
            each = listed([f"{name}{CHILD}{child}" for child in left], SHOWN_CHILDREN)
            selected = any(one.where is not None for one in own)
            trained = "no row of them is trained on" + (", but for those of selections" if selected else "")
            message = (
                f"the mixture does not name {len(left)} of {len(left) + len(named)} children ({each}{what}): "
                f"{trained}; give them shares, or {name} itself, which has the rest"
            )
            yield Finding(level=Level.NOTE, where=where, message=message)
