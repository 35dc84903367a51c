"""Pieces of documents -> the pages they lie in; and, where files are mapped, the tokens of the file.

In: pieces in any order, and the sources' catalogs. Out: `Located`: the same pieces by source and row, so that those of
one page are consecutive. Must hold: a piece that lies in no document is an error before anything is read. Nothing of a
page is kept: a document begins where its page does, after the documents before it, whose lengths the catalog has. Cost:
a few microseconds a source, and 10 ns a piece; of a mapped page, 10 ns for each document before the last that is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.store import SourceCatalog
from torchmix.errors import PlanError
from torchmix.sources.source import Int64Array

ROW_BITS = 40
"""Rows of a source fit these."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Located:
    """[n] pieces by source and row, and Q pages with pieces; both in ascending order."""

    order: Int64Array
    """[n] which of the pieces asked for each is."""
    source: NDArray[np.integer[Any]]
    """[n] index of the source."""
    start: Int64Array
    """[n] first token in the document."""
    tokens: Int64Array
    """[n] tokens of the piece."""
    goes_on: NDArray[np.bool_]
    """[n] whether the document has more tokens."""
    page: Int64Array
    """[n] page of its source."""
    row_in_page: Int64Array
    """[n] row, counted from the page's first."""
    first_row: Int64Array
    """[n] the page's first row."""
    first_piece: Int64Array
    """[Q] the first piece of each page."""

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Each source that is asked for, with its pieces, half-open."""
        borders = np.flatnonzero(np.diff(self.source, prepend=-1)).tolist()
        for start, stop in pairwise([*borders, len(self.source)]):
            yield int(self.source[start]), start, stop


def locate(
    catalogs: Sequence[SourceCatalog],
    source: NDArray[np.integer[Any]],
    rows: Int64Array,
    starts: Int64Array,
    tokens: Int64Array,
) -> Located:
    """Find the pages of pieces.

    Args:
        catalogs: Of all sources.
        source: [n] index of the source.
        rows: [n] row of the source.
        starts: [n] first token in the document.
        tokens: [n] tokens of the piece.

    Raises:
        PlanError: A piece lies outside its document or source.
    """
    num_documents = np.array([catalog.num_documents for catalog in catalogs], np.int64)
    outside = (rows < 0) | (rows >= num_documents[source])
    if outside.any():
        i = int(np.argmax(outside))
        catalog = catalogs[source[i]]
        raise PlanError(
            f"source {catalog.name!r}: a plan asks for row {rows[i]}, there are {catalog.num_documents}; the plan is "
            "of another catalog"
        )
    order = np.argsort(source.astype(np.int64) << ROW_BITS | rows, kind="stable")
    source, rows, starts, tokens = source[order], rows[order], starts[order], tokens[order]
    page, first_row, document_tokens = (np.empty(len(rows), np.int64) for _ in range(3))
    borders = np.flatnonzero(np.diff(source, prepend=-1))
    for start, stop in pairwise([*borders.tolist(), len(rows)]):
        catalog, asked = catalogs[source[start]], rows[start:stop]
        first_rows = catalog.pages.first_row
        page[start:stop] = found = first_rows.searchsorted(asked, "right") - 1
        first_row[start:stop] = first_rows[found]
        document_tokens[start:stop] = catalog.sizes.tokens[asked]
    outside = (starts < 0) | (tokens < 0) | (starts + tokens > document_tokens)
    if outside.any():
        i = int(np.argmax(outside))
        raise PlanError(
            f"source {catalogs[source[i]].name!r}: a plan asks for tokens {starts[i]} to {starts[i] + tokens[i]} of "
            f"row {rows[i]}, which has {document_tokens[i]}; it is of another catalog"
        )
    is_first = np.diff(page, prepend=-1) != 0
    is_first[borders] = True
    return Located(
        order=order,
        source=source,
        start=starts,
        tokens=tokens,
        goes_on=starts + tokens < document_tokens,
        page=page,
        row_in_page=rows - first_row,
        first_row=first_row,
        first_piece=np.flatnonzero(is_first),
    )


def begins_in_files(at: Located, catalogs: Sequence[SourceCatalog], token_bytes: NDArray[np.int64]) -> Int64Array:
    """Where pieces begin in files that hold nothing but tokens.

    Args:
        at: The pieces.
        catalogs: Of all sources.
        token_bytes: [S] bytes of a token in the files of each source; 0 if they hold something else, too.

    Returns:
        [n] the token of the file at which the piece begins; anything for pieces of other sources.
    """
    is_mapped = token_bytes[at.source] > 0
    row_in_page = np.where(is_mapped, at.row_in_page, 0)
    num_pages = len(at.first_piece)
    pieces_of_page = np.diff(at.first_piece, append=len(at.source))
    # Of each page, the documents before the last one that is asked for: their rows, page after page.
    before = row_in_page[at.first_piece + pieces_of_page - 1]
    end = np.cumsum(before)
    base = end - before
    rows = np.repeat(at.first_row[at.first_piece] - base, before) + np.arange(before.sum())
    lengths = np.zeros(len(rows) + 1, np.int64)
    page_begin = np.zeros(num_pages, np.int64)
    source_of_page = at.source[at.first_piece]
    borders = np.flatnonzero(np.diff(source_of_page, prepend=-1)).tolist()
    for start, stop in pairwise([*borders, num_pages]):
        source = source_of_page[start]
        if token_bytes[source]:
            first, last = base[start], end[stop - 1]
            lengths[first + 1 : last + 1] = catalogs[source].sizes.tokens[rows[first:last]]
            page_begin[start:stop] = catalogs[source].pages.offset[at.page[at.first_piece[start:stop]]]
            page_begin[start:stop] //= token_bytes[source]
    tokens_before = np.cumsum(lengths)
    page_begin -= tokens_before[base]
    page_of_piece = np.repeat(np.arange(num_pages), pieces_of_page)
    begins: Int64Array = page_begin[page_of_piece] + tokens_before[base[page_of_piece] + row_in_page] + at.start
    return begins
