"""Sizes of a source's documents: all that planning needs to know of the data.

In: arrays, memory-mapped from the catalog or made by hand in a test. Out: `SourceSizes`, read-only. Must hold: pages
tile the rows, so page p is rows `first_row_of_page[p]:first_row_of_page[p + 1]` and the last entry is the number of
documents. Cost: holding one is free; `check()` reads every entry once (about 1 ns each), so it runs when a catalog is
written and in tests, not when one is opened.

P is pages, N documents (rows) of one source, both in manifest order.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.first_rows import FirstRows
from torchmix.catalog.items import Column, ItemTable
from torchmix.errors import CatalogError

MAX_DOCUMENT_TOKENS = 2**31 - 1
"""Longest document: lengths are int32 (positions and sums are int64)."""
DECODED_TOKEN_BYTES = 4
"""Bytes of a token in a decoded page, for the size of windows."""


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
    items: Mapping[str, ItemTable] = msgspec.field(default_factory=dict)
    """Items inside the documents, such as images, by kind; empty for most sources."""

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
        for table in self.items.values():
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
