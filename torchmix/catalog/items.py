"""Sizes beside tokens: named columns of documents, and tables of the items inside them.

In: what a scan measured of each document, such as bytes, and of items in it, such as the patches of an image. Out:
arrays by name, which lie in the catalog beside those of tokens. Must hold: a column of documents has one integer a row;
the items of a row are consecutive, in the order of their tokens. Cost: nothing for a source that has neither.

    sizes/NAME               [N]      a column of documents
    KIND/first_item_of_row   [N + 1]  where the items of each document begin
    KIND/offset              [I]      the item's first token in its document
    KIND/tokens              [I]      tokens that it stands for
    KIND/sizes/NAME          [I]      a column of items
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import CatalogError

Column = NDArray[np.integer[Any]]


class ItemTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Items of one kind in the documents of a source; N documents, I items."""

    first_item_of_row: Column
    """int64 [N + 1] ascending, from 0 to I."""
    offset: Column
    """[I] first token of the item in its document."""
    tokens: Column
    """[I] tokens that the item stands for, 0 or more."""
    sizes: Mapping[str, Column] = msgspec.field(default_factory=dict)
    """[I] by name, 0 or more each."""

    def check(self, num_documents: int) -> None:
        """Check lengths and signs.

        Raises:
            CatalogError: A value breaks an invariant; names the first one.
        """
        first = np.asarray(self.first_item_of_row)
        if len(first) != num_documents + 1 or first[0] != 0 or (np.diff(first) < 0).any():
            raise CatalogError(f"items of {len(first) - 1} rows, not ascending from 0, for {num_documents} documents")
        for name, column in (("offset", self.offset), ("tokens", self.tokens), *self.sizes.items()):
            if len(column) != first[-1] or (len(column) and column.min() < 0):
                raise CatalogError(f"items: {name} needs {first[-1]} numbers of 0 or more")

    def of_rows(self, start: int, stop: int) -> ItemTable:
        """The items of some consecutive documents."""
        first = np.asarray(self.first_item_of_row[start : stop + 1], np.int64)
        begin, end = int(first[0]), int(first[-1])
        return ItemTable(
            first_item_of_row=first - begin,
            offset=self.offset[begin:end],
            tokens=self.tokens[begin:end],
            sizes={name: column[begin:end] for name, column in self.sizes.items()},
        )


def named_arrays(sizes: Mapping[str, Column], items: Mapping[str, ItemTable]) -> dict[str, Column]:
    """Columns and tables as arrays by the names above, sorted by name."""
    arrays = {f"sizes/{name}": column for name, column in sizes.items()}
    for kind, table in items.items():
        arrays[f"{kind}/first_item_of_row"] = table.first_item_of_row
        arrays[f"{kind}/offset"] = table.offset
        arrays[f"{kind}/tokens"] = table.tokens
        arrays |= {f"{kind}/sizes/{name}": column for name, column in table.sizes.items()}
    return dict(sorted(arrays.items()))


def from_named_arrays(arrays: Mapping[str, Any]) -> tuple[dict[str, Column], dict[str, ItemTable]]:
    """The inverse of `named_arrays`; other names are passed over."""
    sizes: dict[str, Column] = {}
    tables: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        kind, _, column = name.partition("/")
        if kind == "sizes":
            sizes[column] = array
        elif column.startswith("sizes/"):
            tables.setdefault(kind, {}).setdefault("sizes", {})[column.removeprefix("sizes/")] = array
        elif column:
            tables.setdefault(kind, {})[column] = array
    return sizes, {kind: ItemTable(**columns) for kind, columns in tables.items()}


def joined_arrays(parts: Sequence[Mapping[str, Column]]) -> dict[str, list[Column]]:
    """Arrays of several files as those of their source, each as a list to lie end to end.

    Args:
        parts: `named_arrays` of each file, in the order of rows.

    Raises:
        CatalogError: Files have different columns.
    """
    names = list(parts[0]) if parts else []
    for part in parts:
        if list(part) != names:
            raise CatalogError(f"files of one source have columns {names} and {list(part)}; index them again")
    joined: dict[str, list[Column]] = {}
    for name in names:
        columns = [part[name] for part in parts]
        if name.endswith("/first_item_of_row"):
            before = np.cumsum([0, *(int(column[-1]) for column in columns)])
            columns = [
                column[(0 if at == 0 else 1) :].astype(np.int64) + before[at] for at, column in enumerate(columns)
            ]
        joined[name] = columns
    return joined
