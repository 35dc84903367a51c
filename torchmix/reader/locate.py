"""Pieces of documents -> the pages they lie in; and, where files are mapped, the tokens of the file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import SourceCatalog
from torchmix.errors import PlanError
from torchmix.native.calls import Locate
from torchmix.native.load import address_of, array_of, contiguous, is_native, run
from torchmix.reader.protocol import WantedPieces

# --- Pieces -> pages, of all sources at once.
#
# A piece that lies in no document is an error before anything is read. Nothing is remembered about a page: a document
# begins after the documents before it in the page, whose lengths the catalog has. Cost of the native call: two binary
# searches a page, and the lengths of a mapped page up to the document.

ROW_BITS = 40
"""Rows of a source fit these."""


def row_keys(source: NDArray[np.integer[Any]], rows: Int64Array) -> Int64Array:
    """[n] one number for source and row, in their order."""
    keys: Int64Array = source.astype(np.int64) << ROW_BITS | rows
    return keys


class Located(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """[n] pieces by source and row, and Q pages with pieces; both in ascending order."""

    order: Int64Array
    """[n] index of each piece in the request."""
    source: NDArray[np.integer[Any]]
    """[n] index of the source."""
    row: Int64Array
    """[n] row of the source."""
    start: Int64Array
    """[n] first token in the document."""
    tokens: Int64Array
    """[n] tokens of the piece."""
    goes_on: NDArray[np.bool_]
    """[n] whether the document has more tokens."""
    page: Int64Array
    """[n] page of its source."""
    row_in_page: Int64Array
    """[n] row, counted from the first row of the page."""
    first_piece: Int64Array
    """[Q] the first piece of each page."""
    begin_in_file: Int64Array
    """[n] token of the file at which the piece begins, in sources whose files hold only tokens; 0 in others."""
    file: Int64Array
    """[n] number of that file among those of all sources; -1 in others."""

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Each requested source, with the half-open range of its pieces."""
        return _ranges(self.source)


class Locator:
    """Finds pages and places in the sources of a catalog."""

    def __init__(self, catalogs: Sequence[SourceCatalog]) -> None:
        """`catalogs`: all sources."""
        self._catalogs = catalogs
        num_files = np.array([len(catalog.files) for catalog in catalogs], np.int64)
        self.first_file: Int64Array = np.cumsum(num_files) - num_files
        """[S] number of the first file of each source among those of all."""
        self._held: list[NDArray[Any]] = []
        """What the table has the addresses of."""
        self._table: Int64Array | None = None

    def locate(self, pieces: WantedPieces, *, token_bytes: Int64Array) -> Located:
        """Find the pages of pieces.

        Args:
            pieces: The pieces of the request.
            token_bytes: [S] bytes of a token in the files of each source; 0 if the files hold more than tokens.

        Raises:
            PlanError: A piece lies outside its document or source.
        """
        order = row_keys(pieces.source, pieces.row).argsort(kind="stable")
        if not is_native():
            return self.locate_plainly(pieces, order, token_bytes=token_bytes)
        table = self._table_of(token_bytes)
        columns, first_piece = np.empty((8, len(order)), np.int64), np.empty(len(order), np.int64)
        goes_on = np.empty(len(order), np.bool_)
        asked = {name: contiguous(getattr(pieces, name), np.int64) for name in ("row", "start", "tokens")}
        source = contiguous(pieces.source, np.int32)
        call = Locate(
            sources=array_of(table, np.int64),
            source=array_of(source, np.int32),
            row=array_of(asked["row"], np.int64),
            start=array_of(asked["start"], np.int64),
            tokens=array_of(asked["tokens"], np.int64),
            order=array_of(order, np.int64),
            columns=array_of(columns, np.int64),
            goes_on=array_of(goes_on, np.bool_),
            first_piece=array_of(first_piece, np.int64),
        )
        if run(call):
            self.locate_plainly(pieces, order, token_bytes=token_bytes)  # raises
        row, start, tokens, page, row_in_page, begin_in_file, file, _ = columns
        return Located(
            order=order,
            source=pieces.source[order],
            row=row,
            start=start,
            tokens=tokens,
            goes_on=goes_on,
            page=page,
            row_in_page=row_in_page,
            first_piece=first_piece[: call.num_pages],
            begin_in_file=begin_in_file,
            file=file,
        )

    def locate_plainly(self, pieces: WantedPieces, order: Int64Array, *, token_bytes: Int64Array) -> Located:
        """The reference of `locate`; `order`: the pieces by source and row."""
        self._check_rows(pieces.source, pieces.row)
        source, row = pieces.source[order], pieces.row[order]
        start, tokens = pieces.start[order], pieces.tokens[order]
        page, first_row, length, begin_in_file = np.zeros((4, len(order)), np.int64)
        file = np.full(len(order), -1, np.int64)
        for s, first, stop in _ranges(source):
            here, catalog = slice(first, stop), self._catalogs[s]
            table, lengths = catalog.pages, catalog.sizes.tokens
            page[here], first_row[here] = table.first_row.find(row[here])
            length[here] = lengths[row[here]]
            if token_bytes[s]:
                file[here] = self.first_file[s] + table.file_of_chunk[table.chunk_of_pages(page[here])]
                before = [
                    int(lengths[a:b].sum(dtype=np.int64)) for a, b in zip(first_row[here], row[here], strict=True)
                ]
                begin_in_file[here] = (
                    table.offset_of_pages(page[here]) // token_bytes[s] + np.array(before) + start[here]
                )
        self._check_tokens(source, row, start, tokens, length)
        is_first = (np.diff(page, prepend=-1) != 0) | (np.diff(source, prepend=-1) != 0)
        return Located(
            order=order,
            source=source,
            row=row,
            start=start,
            tokens=tokens,
            goes_on=start + tokens < length,
            page=page,
            row_in_page=row - first_row,
            first_piece=np.flatnonzero(is_first),
            begin_in_file=begin_in_file,
            file=file,
        )

    def _table_of(self, token_bytes: Int64Array) -> Int64Array:
        """int64 [S, 13], as the struct source in gather.c."""
        if self._table is None:
            rows = [self._numbers_of(catalog) for catalog in self._catalogs]
            self._table = np.array(rows, np.int64).reshape(-1, 13)
            self._table[:, 11] = self.first_file
        self._table[:, 10] = token_bytes
        return self._table

    def _numbers_of(self, catalog: SourceCatalog) -> list[int]:
        """One row of the table, without bytes of a token and first file."""

        def at(array: NDArray[Any], dtype: type[np.generic]) -> int:
            held = np.ascontiguousarray(array, dtype)
            self._held.append(held)
            return address_of(held)

        table, lengths = catalog.pages, catalog.sizes.tokens
        return [
            at(lengths, np.int32),
            len(lengths),
            at(table.page_row, np.uint32),
            at(table.page_start, np.uint32),
            table.num_pages,
            at(table.chunk_page, np.int64),
            at(table.chunk_row, np.int64),
            at(table.chunk_offset, np.int64),
            at(table.file_of_chunk, np.int32),
            table.num_chunks,
            0,
            0,
            len(catalog.files),
        ]

    def _check_rows(self, source: NDArray[np.integer[Any]], rows: Int64Array) -> None:
        num_documents = np.array([catalog.num_documents for catalog in self._catalogs], np.int64)
        outside = (rows < 0) | (rows >= num_documents[source])
        if outside.any():
            i = int(np.argmax(outside))
            raise PlanError(
                f"source {self._catalogs[source[i]].name!r}: a plan asks for row {rows[i]}, there are "
                f"{num_documents[source[i]]}; the plan is of another catalog"
            )

    def _check_tokens(
        self,
        source: NDArray[np.integer[Any]],
        rows: Int64Array,
        starts: Int64Array,
        tokens: Int64Array,
        document_tokens: Int64Array,
    ) -> None:
        outside = (starts < 0) | (tokens < 0) | (starts > document_tokens) | (tokens > document_tokens - starts)
        if outside.any():
            i = int(np.argmax(outside))
            stop = int(starts[i]) + int(tokens[i])
            raise PlanError(
                f"source {self._catalogs[source[i]].name!r}: a plan asks for tokens {starts[i]} to {stop} of row "
                f"{rows[i]}, which has {document_tokens[i]}; it is of another catalog"
            )


def _ranges(source: NDArray[np.integer[Any]]) -> list[tuple[int, int, int]]:
    """(source, start, stop) of each source, in ascending order."""
    borders = np.flatnonzero(np.diff(source, prepend=-1))
    spans = pairwise([*borders.tolist(), len(source)])
    return [(s, *span) for s, span in zip(source[borders].tolist(), spans, strict=True)]
