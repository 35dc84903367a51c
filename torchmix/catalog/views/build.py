"""The rows of each view of a source.

In: the rows of a source with their properties, and the views that a part needs of it. Out: for each row set its rows,
ascending, and what it leaves to others. Must hold: a row is in two sets only where one of them allows it. Of two sets
that have rows in common, the one with fewer rows keeps them. Cost: DuckDB's for each expression; a byte a row and set.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.properties.expression import columns_of_expression, kept_rows
from torchmix.catalog.properties.rows import PropertyRows
from torchmix.catalog.views.cells import RowsOfCells
from torchmix.catalog.views.cuts import rows_of_children
from torchmix.catalog.views.hold_out import rows_in_band
from torchmix.catalog.views.wanted import SourceViews
from torchmix.errors import RecipeError
from torchmix.recipe.streams import RowSet

Mask = NDArray[np.bool_]


class KeptRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows of one set."""

    rows: Int64Array
    """[K] rows of the source, ascending."""
    left: dict[str, int]
    """Rows that it leaves to a narrower set, by the name of that; a row may count for several."""
    in_no_cell: int = 0
    """With a cell: rows of what it is a cell of that are in no cell of its group."""


def build_views(rows: PropertyRows, wanted: SourceViews, *, may_be_empty: bool) -> dict[str, KeptRows]:
    """The rows of each row set of a source, by name.

    Args:
        rows: The source's rows.
        wanted: Its row sets, and which rows the part has.
        may_be_empty: Whether a set may have no rows once others and held out rows are gone.

    Raises:
        RecipeError: A property is missing, an expression is refused or does not fit, a set that is no cell keeps
            nothing or leaves all of its rows to others, or a child does not exist.
    """
    masks, outside = _masks(rows, wanted)
    for name, mask in masks.items():
        if not mask.any() and wanted.row_sets[name].cell is None:
            raise RecipeError(
                f"keeps none of the {len(mask):,} rows of {wanted.name!r}; a row for which it is null is not kept",
                _where(name, wanted.row_sets[name]),
            )
    held = None if wanted.band is None else rows_in_band(rows, wanted.source, wanted.band)
    sizes = {name: int(np.count_nonzero(mask)) for name, mask in masks.items()}
    order = sorted(masks, key=lambda name: (sizes[name], name == wanted.name, name))
    found: dict[str, KeptRows] = {}
    for number, name in enumerate(order):
        mask, left = masks[name].copy(), {}
        for narrower in order[:number]:
            if "allow" in (wanted.row_sets[name].overlap, wanted.row_sets[narrower].overlap):
                continue
            if common := int(np.count_nonzero(masks[name] & masks[narrower])):
                left[narrower] = common
                mask &= ~masks[narrower]
        is_cell = wanted.row_sets[name].cell is not None
        if left and not mask.any() and not is_cell:
            others = ", ".join(left)
            raise RecipeError(
                f"all of its {sizes[name]:,} rows are in {others}, too; write `overlap: allow` for a selection whose "
                "rows may come twice, or leave one of them out",
                f"mixture.{name}",
            )
        if held is not None:
            mask &= held
        kept = np.flatnonzero(mask)
        if not len(kept) and not may_be_empty and not is_cell:
            raise RecipeError(f"all of its {sizes[name]:,} rows are held out; hold out less", f"mixture.{name}")
        found[name] = KeptRows(rows=kept, left=left, in_no_cell=outside.get(name, 0))
    return found


def _masks(rows: PropertyRows, wanted: SourceViews) -> tuple[dict[str, Mask], dict[str, int]]:
    """The rows that each set says it has; and for cells, how many rows are in no cell."""
    num_rows = rows.source.num_documents
    children = {name: one.child for name, one in wanted.row_sets.items() if one.child is not None}
    cut = rows_of_children(rows, wanted.source, list(children.values())) if children else {}
    masks: dict[str, Mask] = {}
    in_cells = RowsOfCells(rows, [one.cell for one in wanted.row_sets.values() if one.cell is not None])
    selected: dict[str, Mask] = {}
    of_base: dict[tuple[str, str], Mask] = {}
    for name, one in wanted.row_sets.items():
        if one.where is not None:
            if one.where not in selected:
                selected[one.where] = _selected(rows, one.where, f"sources.{one.cell.base if one.cell else name}.where")
            mask = selected[one.where]
        elif one.child is not None:
            mask = cut[one.child]
        else:
            mask = np.ones(num_rows, np.bool_)
        masks[name] = mask
        if one.cell is not None:
            masks[name] = mask & in_cells.of(one.cell)
            key = one.cell.group, one.cell.base
            of_base[key] = of_base.get(key, mask) & ~masks[name]
    cells = {name: one.cell for name, one in wanted.row_sets.items() if one.cell is not None}
    counts = {key: int(np.count_nonzero(mask)) for key, mask in of_base.items()}
    return masks, {name: counts[cell.group, cell.base] for name, cell in cells.items()}


def _selected(rows: PropertyRows, text: str, where: str) -> Mask:
    columns = columns_of_expression(text, where)
    rows.check(columns, where)
    parts = [kept_rows(text, table, where) for _, table in rows.blocks(columns)]
    return np.concatenate(parts) if parts else np.zeros(0, np.bool_)


def _where(name: str, row_set: RowSet) -> str:
    return f"sources.{name}.where" if row_set.where is not None else f"mixture.{name}"
