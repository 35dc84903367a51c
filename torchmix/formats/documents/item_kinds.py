"""Items of documents that the catalog keeps beside images: runs of tokens without loss, and turns of a chat.

In: rows and what each has. Out: an `ItemTable`. Must hold: runs are in the order of their tokens; no two touch. Cost: 8
bytes a run and 9 a turn, and 8 a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.items import ItemTable

NO_LOSS = "no_loss"
"""A run of tokens that no model is trained to predict."""
TURN = "turn"
"""A message of a chat; its column `role` numbers the role."""
ROLE = "role"

Runs = tuple[NDArray[np.integer], NDArray[np.integer]]
"""Where the runs of a row begin in its document, and their tokens."""


def runs_table(runs: Mapping[int, Runs], num_rows: int) -> ItemTable:
    """Runs of tokens without loss, by row."""
    rows = sorted(row for row, (offsets, _) in runs.items() if len(offsets))
    none = np.zeros(0, np.int32)
    return ItemTable(
        first_item_of_row=_first_items(rows, [len(runs[row][0]) for row in rows], num_rows),
        offset=np.concatenate([none, *(runs[row][0] for row in rows)]).astype(np.int32),
        tokens=np.concatenate([none, *(runs[row][1] for row in rows)]).astype(np.int32),
    )


def turns_table(roles: Mapping[int, Sequence[int]], num_rows: int) -> ItemTable:
    """Roles of the turns of each row."""
    rows = sorted(roles)
    of_rows = [role for row in rows for role in roles[row]]
    return ItemTable(
        first_item_of_row=_first_items(rows, [len(roles[row]) for row in rows], num_rows),
        offset=np.zeros(len(of_rows), np.int32),
        tokens=np.zeros(len(of_rows), np.int32),
        sizes={ROLE: np.array(of_rows, np.uint8)},
    )


def roles_of_rows(table: ItemTable, rows: Int64Array) -> list[list[int]]:
    """Roles of the turns of some rows, as `turns_table` had them."""
    first = np.asarray(table.first_item_of_row)
    role = table.sizes[ROLE]
    return [role[first[row] : first[row + 1]].tolist() for row in rows.tolist()]


def _first_items(rows: list[int], counts: list[int], num_rows: int) -> Int64Array:
    of_row = np.zeros(num_rows, np.int64)
    of_row[rows] = counts
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(of_row)])
