"""Rows of one call -> their ids, each row once, in few batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.mixture.keys import hash_columns, named_key
from torchmix.reader.locate import Located, row_keys
from torchmix.reader.open_documents import OpenDocuments, Run
from torchmix.reader.page_cache import NO_ID, DecodedPage
from torchmix.reader.protocol import OtherRows, chosen_lists
from torchmix.reader.source_pages import SourcePages
from torchmix.transform.tokenizer import EncodedRows, RowEncoder, RowsToEncode, join_encoded, row_array

# --- The rows that one call must encode, and what the pages hold of them.
#
# Cost: a few array operations a call, and a copy of the content of each row.

Content = bytes | NDArray[np.integer[Any]]
"""A row as the file holds it: bytes of a text, or ids."""


class CallRows:
    """R rows by source, row and epoch, ascending; the pieces that need them, and the pages that hold them."""

    def __init__(self, at: Located, pieces: Int64Array, epochs: Int64Array) -> None:
        """Nothing is at hand yet.

        Args:
            at: All pieces of the call.
            pieces: [m] numbers of those to encode, ascending.
            epochs: [m] pass over their source, or 0 where it does not matter.
        """
        self.pieces = pieces
        """[m] pieces of the call, ascending."""
        source, row = at.source[pieces].astype(np.int64), at.row[pieces]
        order = np.lexsort((epochs, row, source))
        is_new = np.ones(len(order), np.bool_)
        if len(order):
            columns = source[order], row[order], epochs[order]
            is_new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
        self.row_of_piece = np.empty(len(order), np.int64)
        """[m] which of the R rows each piece is of."""
        self.row_of_piece[order] = np.cumsum(is_new) - 1
        first = order[is_new]
        self.source, self.row, self.epoch = source[first], row[first], epochs[first]
        """[R] each."""
        self._row_in_page = at.row_in_page[pieces[first]].tolist()
        page = at.first_piece.searchsorted(pieces[first], side="right") - 1
        self.needs_page = np.zeros(len(at.first_piece), np.bool_)
        """[Q] which pages of the call hold one of the rows."""
        self.needs_page[page] = True
        self._first_row = page.searchsorted(np.arange(len(at.first_piece) + 1)).tolist()
        self.content: list[Content] = [b""] * len(first)
        """[R] each row as its page holds it, once the page was seen."""
        self.is_blank = np.zeros(len(first), np.bool_)
        """[R] rows of pages that could not be read."""

    def __len__(self) -> int:
        return len(self.content)

    def gather(self, q: int, page: DecodedPage, *, is_text: bool) -> None:
        """Take the content of the rows in the q-th page of the call: bytes of texts, or else ids."""
        first, stop = self._first_row[q : q + 2]
        if page.is_blank:
            self.is_blank[first:stop] = True
            return
        offsets = page.offsets
        spans = [(offsets[row], offsets[row + 1]) for row in self._row_in_page[first:stop]]
        if is_text:
            cells = page.values.data
            self.content[first:stop] = [bytes(cells[begin:end]) for begin, end in spans]
        else:
            self.content[first:stop] = [page.values[begin:end].copy() for begin, end in spans]


# --- Encoding the rows of a call.
#
# Every row has the length that the catalog holds, otherwise an error names source, file and row, or the row is masked;
# no row is encoded that no piece asks for, and a document that later calls continue is kept until its last piece.

logger = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20
"""Content of rows that are encoded together; a longer row is encoded alone."""


class RowEncoding:
    """Encodes the rows of some sources; not for several threads at once."""

    def __init__(self, sources: Sequence[SourcePages], documents: OpenDocuments, *, seed: int) -> None:
        """Nothing is encoded yet.

        Args:
            sources: All sources of the reader.
            documents: Keeps the ids of documents that later calls continue.
            seed: The recipe's, which seeds of rows follow from.
        """
        self._sources = sources
        self._encoders = [source.row_encoder for source in sources]
        self.is_encoded = np.array([encoder is not None for encoder in self._encoders], np.bool_)
        """[S] sources whose rows must be encoded."""
        self._is_mapped = np.array([encoder is not None and encoder.is_mapped for encoder in self._encoders], np.bool_)
        self._keys = [named_key(seed, "map", source.catalog.name) for source in sources]
        self._documents = documents
        self._masked: set[tuple[int, int]] = set()
        self.others: tuple[OtherRows, ...] = ()
        """What maps gave beside the ids, of the call that was encoded last."""
        self._with_others: set[int] = set()
        """Sources whose maps give more than ids."""
        self.rows_encoded = 0
        """Rows that were encoded, each time."""
        self.rows_served = 0
        """Rows whose first token was asked for."""

    @property
    def num_masked_rows(self) -> int:
        """Rows that were masked because they could not be encoded as they were indexed."""
        return len(self._masked)

    def begin(self, at: Located, epochs: Int64Array) -> tuple[CallRows, list[Run]]:
        """Find the rows of a call that must be encoded.

        Args:
            at: The pieces of the call.
            epochs: [n] pass over the source of each piece, in the order of the request.

        Returns:
            These rows, and the runs of pieces whose ids are at hand.
        """
        has_ids = (at.tokens > 0) | at.goes_on  # a piece may be of no tokens
        pieces = np.flatnonzero(self.is_encoded[at.source] & has_ids)
        self.rows_served += int((at.start[pieces] == 0).sum())
        epoch = np.zeros(len(pieces), np.int64)
        if self._is_mapped.any():
            epoch = np.where(self._is_mapped[at.source[pieces]], epochs[at.order[pieces]], 0)
        found = self._documents.find(row_keys(at.source[pieces], at.row[pieces]), at.start[pieces], epoch)
        if self._with_others:  # what comes with a row's first token is not kept
            begins = (at.start[pieces] == 0) & np.isin(at.source[pieces], list(self._with_others))
            found = [one for one in found if not begins[one[1]]]
        at_hand = [piece for _, piece, _ in found]
        runs: list[Run] = [(values, int(pieces[piece]), begin) for values, piece, begin in found]
        return CallRows(at, np.delete(pieces, at_hand), np.delete(epoch, at_hand)), runs

    def gather(self, rows: CallRows, q: int, source: int, page: DecodedPage) -> None:
        """Take the rows of a call out of its q-th page."""
        encoder = self._encoders[source]
        rows.gather(q, page, is_text=encoder is not None and encoder.takes == "text")

    def encode(self, at: Located, rows: CallRows) -> Iterator[Run]:
        """Encode the rows of a call, whose pages were all seen; give the runs of their pieces.

        Raises:
            SourceUnreadable: A row cannot be encoded.
            CorruptPage: A row has another number of tokens than it was indexed with.
        """
        self.others = ()
        if not len(rows):
            return
        parts: list[NDArray[np.integer[Any]]] = []
        others: list[tuple[str, Int64Array, pa.Array]] = []
        part_of_row, begin_of_row = np.empty((2, len(rows)), np.int64)
        lengths = self._lengths(rows)
        is_open = self._documents.is_open(row_keys(rows.source, rows.row))
        for chosen in self._batches(rows):
            encoded = self._encode(rows, chosen, lengths)
            part_of_row[chosen], begin_of_row[chosen] = len(parts), encoded.offsets[:-1]
            parts.append(encoded.values)
            others += [(name, chosen, array) for name, array in encoded.others.items()]
            if encoded.others:
                self._with_others.update(rows.source[chosen].tolist())
            for i in np.flatnonzero(is_open[chosen]).tolist():
                row, ids = chosen[i], encoded.values[encoded.offsets[i] : encoded.offsets[i + 1]]
                key = row_keys(rows.source[row : row + 1], rows.row[row : row + 1])
                self._documents.keep(int(key[0]), int(rows.epoch[row]), ids)
        self.others = _of_first_pieces(at, rows, others) if others else ()
        part = part_of_row[rows.row_of_piece]
        begins = (begin_of_row[rows.row_of_piece] + at.start[rows.pieces]).tolist()
        is_first = (np.diff(part, prepend=-1) != 0) | (np.diff(rows.pieces, prepend=-2) != 1)
        borders = [*np.flatnonzero(is_first).tolist(), len(begins)]
        for first, stop in pairwise(borders):
            yield parts[part[first]], int(rows.pieces[first]), begins[first:stop]

    def whole_page(self, source: int, first_row: int, page: DecodedPage) -> DecodedPage:
        """All rows of a page in epoch 0, encoded; `first_row` is its first row in the source. Errors as `encode`."""
        counts = self._sources[source].catalog.sizes.tokens[first_row : first_row + len(page.offsets) - 1]
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        with_tokens = np.flatnonzero(counts)
        numbers = np.arange(len(with_tokens))
        zeros = np.zeros(len(numbers), np.int64)
        at = Located(
            order=numbers,
            source=zeros + source,
            row=first_row + with_tokens,
            start=zeros,
            tokens=counts[with_tokens].astype(np.int64),
            goes_on=np.zeros(len(numbers), np.bool_),
            page=zeros,
            row_in_page=with_tokens,
            first_piece=np.zeros(1 if len(numbers) else 0, np.int64),
            begin_in_file=zeros,
            file=zeros - 1,
        )
        rows = CallRows(at, numbers, zeros)
        if not len(rows):
            return DecodedPage(values=np.zeros(0, np.uint16), offsets=offsets.data)
        self.gather(rows, 0, source, page)
        parts = [values for values, _, _ in self.encode(at, rows)]  # the rows are all of each part, in order
        self.rows_served += len(rows)
        return DecodedPage(values=parts[0] if len(parts) == 1 else np.concatenate(parts), offsets=offsets.data)

    def _lengths(self, rows: CallRows) -> Int64Array:
        """[R] tokens of each row, as the catalog has them."""
        found = np.empty(len(rows), np.int64)
        for s in sorted(set(rows.source.tolist())):
            chosen = rows.source == s
            found[chosen] = self._sources[s].catalog.sizes.tokens[rows.row[chosen]]
        return found

    def _batches(self, rows: CallRows) -> Iterator[Int64Array]:
        """Rows that are encoded together, ascending: those of one encoder, of mapped ones of one source and epoch."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, (s, epoch) in enumerate(zip(rows.source.tolist(), rows.epoch.tolist(), strict=True)):
            key = (s, epoch) if self._is_mapped[s] else (self._encoders[s],)
            groups.setdefault(key, []).append(i)
        for chosen in groups.values():
            start, num_bytes = 0, 0
            for i, row in enumerate(chosen):
                content = rows.content[row]
                size = len(content) if isinstance(content, bytes) else content.nbytes
                if i > start and num_bytes + size > BATCH_BYTES:
                    yield np.array(chosen[start:i], np.int64)
                    start, num_bytes = i, 0
                num_bytes += size
            yield np.array(chosen[start:], np.int64)

    def _encode(self, rows: CallRows, chosen: Int64Array, lengths: Int64Array) -> EncodedRows:
        """Ids of some rows of one group, each as long as the catalog says."""
        wanted = lengths[chosen]
        if rows.is_blank[chosen].any():
            return self._apart(rows, chosen, lengths) if len(chosen) > 1 else _blank(wanted)
        s = int(rows.source[chosen[0]])
        encoder = self._encoders[s]
        assert encoder is not None, "its rows are encoded"
        self.rows_encoded += len(chosen)
        try:
            encoded = encoder.encode(self._asked(rows, chosen, encoder))
        except SourceUnreadable as error:
            self.rows_encoded -= len(chosen)
            if len(chosen) > 1:
                return self._apart(rows, chosen, lengths)  # so that the error names the row, and only that one is bad
            row = int(rows.row[chosen[0]])
            error.locate(self._sources[s].place_of_row(row)[0])
            if not self._sources[s].masks_bad:
                raise
            return self._mask(s, row, wanted, str(error))
        found = np.diff(encoded.offsets)
        if np.array_equal(found, wanted):
            return encoded
        if len(chosen) > 1:
            return self._apart(rows, chosen, lengths)
        row = int(rows.row[chosen[0]])
        where, file_row = self._sources[s].place_of_row(row)
        by = "its map gives this row another length" if encoder.is_mapped else "the tokenizer's library here is another"
        fault = CorruptPage(
            f"row {file_row} gives {int(found.sum())} tokens, the catalog says {int(wanted[0])}: the file was altered "
            f"after it was indexed, or {by} than then; put it back, or run torchmix index --force",
            where,
            row=file_row,
        )
        if not self._sources[s].masks_bad:
            raise fault
        return self._mask(s, row, wanted, str(fault))

    def _apart(self, rows: CallRows, chosen: Int64Array, lengths: Int64Array) -> EncodedRows:
        """The same of each half, until the rows at fault are alone."""
        half = len(chosen) // 2
        return join_encoded([self._encode(rows, part, lengths) for part in (chosen[:half], chosen[half:])])

    def _asked(self, rows: CallRows, chosen: Int64Array, encoder: RowEncoder) -> RowsToEncode:
        content = [rows.content[i] for i in chosen.tolist()]
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum([len(one) for one in content], out=offsets[1:])
        values: NDArray[np.integer[Any]]
        if isinstance(content[0], bytes):
            values = np.frombuffer(b"".join(content), np.uint8)  # all are, or none
        else:
            values = np.concatenate(content)
        s, row, epoch = int(rows.source[chosen[0]]), rows.row[chosen], int(rows.epoch[chosen[0]])
        is_alone = len(chosen) == 1  # where one of several is at fault, it is encoded alone
        file_row = self._sources[s].place_of_row(int(row[0]))[1] if is_alone else 0
        seed = np.zeros(len(chosen), np.uint64)
        if encoder.is_mapped:
            seed = hash_columns(self._keys[s], row, rows.epoch[chosen])
        return RowsToEncode(
            rows=row_array(values, offsets, encoder.takes),
            row=row,
            epoch=epoch,
            seed=seed,
            first_row=file_row,
        )

    def _mask(self, s: int, row: int, wanted: Int64Array, what: str) -> EncodedRows:
        if (s, row) not in self._masked:
            self._masked.add((s, row))
            logger.warning("%s - it comes without loss, as bad_rows: mask says", what)
        return _blank(wanted)


def _of_first_pieces(
    at: Located, rows: CallRows, others: Sequence[tuple[str, Int64Array, pa.Array]]
) -> tuple[OtherRows, ...]:
    """Other arrays of the rows whose first token was asked for, with the piece that begins each row."""
    is_first = at.start[rows.pieces] == 0
    piece_of_row = np.full(len(rows), -1, np.int64)
    piece_of_row[rows.row_of_piece[is_first]] = at.order[rows.pieces[is_first]]
    found: list[OtherRows] = []
    for name, chosen, array in others:
        pieces = piece_of_row[chosen]
        asked = np.flatnonzero(pieces >= 0)
        found.append(OtherRows(name=name, piece=pieces[asked], values=chosen_lists(array, asked)))
    return tuple(found)


def _blank(lengths: Int64Array) -> EncodedRows:
    """One row that cannot be read."""
    return EncodedRows(values=np.full(int(lengths[0]), NO_ID, np.int32), offsets=np.array([0, int(lengths[0])]))
