"""`split_by` of a source -> which child each of its rows is of.

In: the rows of a source. Out: a mask for each wanted child. Must hold: a row is in at most one child; children of
folders have all rows; children of quantiles differ by at most one row, and ties go by the order of rows. Cost: folders,
a look at each path; quantiles, one sort of the property.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.properties.rows import PropertyRows
from torchmix.catalog.views.folders import child_folder
from torchmix.errors import RecipeError
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.source.format import paths_of
from torchmix.recipe.structs import Quantiles, Source


def rows_of_children(rows: PropertyRows, source: Source, children: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """A mask [rows] of each child.

    Args:
        rows: The source's rows.
        source: What the recipe says of it; it has `split_by`.
        children: Names of the wanted children.

    Raises:
        RecipeError: There is no such child; or the property is missing, or no number.
    """
    name = rows.source.name
    if isinstance(source.split_by, Quantiles):
        return _quantiles(rows, source.split_by, children, f"sources.{name}.split_by")
    where = f"sources.{name}.split_by"
    patterns = paths_of(source)
    child_of_file = [child_folder(patterns, file.path, where) for file in rows.source.files]
    found = sorted(set(child_of_file))
    for child in children:
        if child not in found:
            raise RecipeError(
                f"there is no folder {child!r}{nearest(child, found)} in {name!r}; its folders are {listed(found)}",
                f"mixture.{name}/{child}",
            )
    masks = {child: np.zeros(rows.source.num_documents, np.bool_) for child in children}
    for file, child in zip(rows.source.files, child_of_file, strict=True):
        if child in masks:
            masks[child][file.first_row : file.first_row + file.num_rows] = True
    return masks


def _quantiles(rows: PropertyRows, cut: Quantiles, children: Sequence[str], where: str) -> dict[str, NDArray[np.bool_]]:
    rows.check([cut.column], f"{where}.column")
    column = rows.whole([cut.column])[cut.column]
    try:
        values = column.cast("float64").to_numpy()
    except (ValueError, NotImplementedError):
        raise RecipeError(f"property {cut.column!r} is {column.type}, no number", f"{where}.column") from None
    ranked = np.argsort(values, kind="stable")  # nulls are NaN here, and come last
    ranked = ranked[: len(values) - int(np.isnan(values).sum())]
    masks: dict[str, NDArray[np.bool_]] = {}
    for child in children:
        number = int(child[1:])
        start, stop = (len(ranked) * border // cut.quantiles for border in (number - 1, number))
        masks[child] = np.zeros(len(values), np.bool_)
        masks[child][ranked[start:stop]] = True
    return masks
