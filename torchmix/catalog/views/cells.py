"""Cells of groups -> the rows of a source that lie in each.

In: the rows of a source, and cells. Out: a mask for each cell. Must hold: a value is compared as text, whatever the
type of the property: 2020 is `2020`, and truth is `true`; a row whose property is null is in no cell. Cost: one look at
each property, and 2 bytes a row for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchmix.catalog.properties.rows import PropertyRows
from torchmix.errors import RecipeError
from torchmix.recipe.streams import Cell

_NO_VALUE = -1


class RowsOfCells:
    """Which rows of a source lie in which cell."""

    def __init__(self, rows: PropertyRows, cells: Sequence[Cell]) -> None:
        """Look the properties of some cells up.

        Raises:
            RecipeError: A property is missing, or of a type without values that text can name.
        """
        values: dict[str, set[str]] = {}
        for cell in cells:
            for name, value in cell.values:
                values.setdefault(name, set()).add(value)
        self._num_rows = rows.source.num_documents
        self._number = {name: {value: n for n, value in enumerate(sorted(values[name]))} for name in values}
        self._number_of_row = {name: _numbers(rows, name, sorted(values[name]), cells[0].group) for name in values}

    def of(self, cell: Cell) -> NDArray[np.bool_]:
        """A mask [rows] of one of these cells."""
        mask = np.ones(self._num_rows, np.bool_)
        for name, value in cell.values:
            mask &= self._number_of_row[name] == self._number[name][value]
        return mask


def _numbers(rows: PropertyRows, name: str, values: Sequence[str], group: str) -> NDArray[np.int16]:
    """[rows] the number of each row's value among some values, or that of no value."""
    where = f"mixture.{group}.cells.shares.{name}"
    rows.check([name], where)
    found = [np.zeros(0, np.int16)]
    for _, table in rows.blocks([name]):
        at = pc.index_in(_texts(table[name], name, where), value_set=pa.array(values, pa.string()))
        found.append(at.cast(pa.int16()).fill_null(_NO_VALUE).to_numpy().astype(np.int16))
    return np.concatenate(found)


def _texts(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        message = f"property {name!r} is {column.type}, whose values no text names; use one of text, numbers or truth"
        raise RecipeError(message, where) from None
