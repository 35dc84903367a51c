"""Sizes of the documents of a source, and of the items inside them: all that planning needs to know of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.page_table import FirstRows
from torchmix.errors import CatalogError

# --- Sizes beside tokens: named columns of documents, and runs of tokens inside them.
#
# A column of documents has one integer a row. Items are runs of tokens that a module computes; marks are runs of which
# something else is known, as that they have no loss. The runs of a row are consecutive, in the order of their tokens.
#
#     sizes/NAME              [N]      a column of documents
#     KIND/first_run_of_row   [N + 1]  where the runs of each document begin
#     KIND/offset             [R]      the run's first token in its document
#     KIND/tokens             [R]      its tokens
#     KIND/sizes/NAME         [R]      a column of runs
#     marks/NAME/...                   the same of marks

Column = NDArray[np.integer[Any]]


class TokenRuns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Runs of tokens in the documents of a source: items of one kind, or marks. N documents, R runs."""

    first_run_of_row: Column
    """int64 [N + 1] ascending, from 0 to R."""
    offset: Column
    """[R] first token of the run in its document."""
    tokens: Column
    """[R] tokens of the run, 0 or more."""
    sizes: Mapping[str, Column] = msgspec.field(default_factory=dict)
    """[R] by name, 0 or more each."""

    def check(self, num_documents: int) -> None:
        """Check lengths and signs.

        Raises:
            CatalogError: A value breaks an invariant; names the first one.
        """
        first = np.asarray(self.first_run_of_row)
        if len(first) != num_documents + 1 or first[0] != 0 or (np.diff(first) < 0).any():
            raise CatalogError(f"runs of {len(first) - 1} rows, not ascending from 0, for {num_documents} documents")
        for name, column in (("offset", self.offset), ("tokens", self.tokens), *self.sizes.items()):
            if len(column) != first[-1] or (len(column) and column.min() < 0):
                raise CatalogError(f"runs of tokens: {name} needs {first[-1]} numbers of 0 or more")

    def of_rows(self, start: int, stop: int) -> TokenRuns:
        """The runs of some consecutive documents."""
        first = np.asarray(self.first_run_of_row[start : stop + 1], np.int64)
        begin, end = int(first[0]), int(first[-1])
        return TokenRuns(
            first_run_of_row=first - begin,
            offset=self.offset[begin:end],
            tokens=self.tokens[begin:end],
            sizes={name: column[begin:end] for name, column in self.sizes.items()},
        )


MARKS = "marks/"


def named_arrays(
    sizes: Mapping[str, Column], items: Mapping[str, TokenRuns], marks: Mapping[str, TokenRuns]
) -> dict[str, Column]:
    """Columns and tables as arrays by the names above, sorted by name."""
    arrays = {f"sizes/{name}": column for name, column in sizes.items()}
    for kind, table in {**items, **{f"{MARKS}{name}": table for name, table in marks.items()}}.items():
        arrays[f"{kind}/first_run_of_row"] = table.first_run_of_row
        arrays[f"{kind}/offset"] = table.offset
        arrays[f"{kind}/tokens"] = table.tokens
        arrays |= {f"{kind}/sizes/{name}": column for name, column in table.sizes.items()}
    return dict(sorted(arrays.items()))


class NamedSizes(NamedTuple):
    """What `named_arrays` takes."""

    sizes: dict[str, Column]
    items: dict[str, TokenRuns]
    marks: dict[str, TokenRuns]


def from_named_arrays(arrays: Mapping[str, Any]) -> NamedSizes:
    """The inverse of `named_arrays`; other names are passed over."""
    sizes: dict[str, Column] = {}
    tables: dict[bool, dict[str, dict[str, Any]]] = {False: {}, True: {}}
    for name, array in arrays.items():
        of_kinds = tables[name.startswith(MARKS)]
        kind, _, column = name.removeprefix(MARKS).partition("/")
        if kind == "sizes":
            sizes[column] = array
        elif column.startswith("sizes/"):
            of_kinds.setdefault(kind, {}).setdefault("sizes", {})[column.removeprefix("sizes/")] = array
        elif column:
            of_kinds.setdefault(kind, {})[column] = array
    items, marks = ({kind: TokenRuns(**columns) for kind, columns in of.items()} for of in tables.values())
    return NamedSizes(sizes, items, marks)


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
        if name.endswith("/first_run_of_row"):
            before = np.cumsum([0, *(int(column[-1]) for column in columns)])
            columns = [
                column[(0 if at == 0 else 1) :].astype(np.int64) + before[at] for at, column in enumerate(columns)
            ]
        joined[name] = columns
    return joined


# --- Sizes of a source's documents: all that planning needs to know of the data.
#
# Pages tile the rows, so page p is rows `first_row_of_page[p]:first_row_of_page[p + 1]` and the last entry is the
# number of documents. Cost: holding one is free; `check()` reads every entry once (about 1 ns each), so it runs when a
# catalog is written and in tests, not when one is opened.
#
# P is pages, N documents (rows) of one source, both in manifest order.

MAX_DOCUMENT_TOKENS = 2**31 - 1
"""Longest document: lengths are int32 (positions and sums are int64)."""
DECODED_TOKEN_BYTES = 4
"""Bytes of a token in a decoded page, for the size of windows."""


IN_FILE = "in_file"
"""The size of a document that has so many ids in its file, where it becomes another number of them."""


class SourceSizes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a draw reads of one source."""

    first_row_of_page: NDArray[np.int64] | FirstRows
    """[P + 1] ascending row numbers, from 0 to N; a page may hold no row."""
    tokens: NDArray[np.int32]
    """[N] tokens of each document, 0 or more."""
    window_pages: int
    """Pages of one shuffle window, 1 or more; fixed when the source was indexed."""
    longest_tokens: int = -1
    """Tokens of the longest document, from the catalog; -1: computed from `tokens`."""
    num_tokens: int = -1
    """Tokens of all documents, from the catalog; -1: computed from `tokens`."""
    columns: Mapping[str, Column] = msgspec.field(default_factory=dict)
    """[N] other sizes of each document, by name; empty for most sources."""
    items: Mapping[str, TokenRuns] = msgspec.field(default_factory=dict)
    """Items inside the documents, such as images, by kind; empty for most sources."""
    marks: Mapping[str, TokenRuns] = msgspec.field(default_factory=dict)
    """What is known of tokens of documents beside their items, by name; empty for most sources."""

    def __post_init__(self) -> None:
        if self.longest_tokens < 0:
            msgspec.structs.force_setattr(self, "longest_tokens", int(self.tokens.max(initial=0)))
        if self.num_tokens < 0:
            msgspec.structs.force_setattr(self, "num_tokens", int(self.tokens.sum(dtype=np.int64)))

    @property
    def num_pages(self) -> int:
        """P, pages of the source."""
        return len(self.first_row_of_page) - 1

    @property
    def num_documents(self) -> int:
        """N, rows of the source, the empty ones included."""
        return len(self.tokens)

    def check(self) -> None:
        """Check every invariant above, in O(P + N).

        Raises:
            CatalogError: A value breaks an invariant; names the first one.
        """
        first, tokens = np.asarray(self.first_row_of_page), self.tokens
        if first.ndim != 1 or first.dtype != np.int64 or len(first) < 2:
            raise CatalogError(
                f"first_row_of_page must be int64 [P + 1] with P >= 1, not {first.dtype} {list(first.shape)}"
            )
        if tokens.ndim != 1 or tokens.dtype != np.int32:
            raise CatalogError(f"tokens must be int32 [N], not {tokens.dtype} {list(tokens.shape)}")
        if first[0] != 0 or first[-1] != len(tokens):
            raise CatalogError(f"pages cover rows {first[0]} to {first[-1]}, documents are 0 to {len(tokens)}")
        steps = np.diff(first)
        if (steps < 0).any():
            page = int(np.argmax(steps < 0))
            raise CatalogError(f"page {page} starts at row {first[page]}, the next one at {first[page + 1]}, before it")
        if len(tokens) and tokens.min() < 0:
            row = int(np.argmax(tokens < 0))
            raise CatalogError(f"row {row} has {tokens[row]} tokens; lengths are 0 to {MAX_DOCUMENT_TOKENS}")
        if self.window_pages < 1:
            raise CatalogError(f"window_pages is {self.window_pages}, it must be 1 or more")
        for name, column in self.columns.items():
            if len(column) != len(tokens) or (len(column) and column.min() < 0):
                raise CatalogError(f"sizes: {name} needs {len(tokens)} numbers of 0 or more")
        for table in (*self.items.values(), *self.marks.values()):
            table.check(len(tokens))


def window_pages_of(*, num_pages: int, num_tokens: int, most_pages: int, most_bytes: int) -> int:
    """Pages of a source's shuffle window: as many mean pages as fit `most_bytes`, in [1, most_pages].

    A token counts 4 bytes, its size in memory, however the file encodes it: the encoding of a file must not decide how
    well it is shuffled.

    Args:
        num_pages: P of the source.
        num_tokens: Tokens of all its documents.
        most_pages: The recipe's `shuffle.window_pages`.
        most_bytes: The recipe's `shuffle.window_bytes`.
    """
    fitting = most_bytes * num_pages // max(1, DECODED_TOKEN_BYTES * num_tokens)
    return max(1, min(fitting, most_pages))


def window_units_of_view(*, num_pages: int, num_rows: int, num_kept: int, window_pages: int) -> int:
    """Pages of a view's window: it holds about as many kept rows as a window of the source holds rows.

    Args:
        num_pages, num_rows: Pages and rows of the source.
        num_kept: Rows of the view.
        window_pages: Pages of the source's window.

    Returns:
        At least `window_pages`, at most all pages.
    """
    return min(max(1, num_pages), -(-window_pages * max(1, num_rows) // max(1, num_kept)))
