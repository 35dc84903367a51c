"""Pieces of documents -> their tokens, each page read and decoded once while it is kept.

The result is a pure function of the request; the cache, coalesced reads and `warm` decide only how often a page is
decoded. One reader belongs to one thread at a time.

Cost beyond decoding: a memoryview slice per piece, straight from the page to its place. With pages scattered over 64 MB
a slice takes 0.5 microseconds and 0.4 ns a token: 1 ns a token for pieces of 800 tokens, 5 for pieces of 100. Copying
alone, measured in ns a token for pieces of 100, 800 and 4000 tokens within 16 MB: memoryview slices 2.1, 0.4, 0.3;
numpy slices 3.2, 0.6, 0.3; Arrow list views per page 6, 3, 2; an index per token 5, 4, 4; np.concatenate 2.5, 0.4, 0.2,
but with all pages of a call in memory at once. Memory: the cache, the rests of open documents, the largest result so
far, and one run of pages.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog, IdLimit
from torchmix.errors import LoaderClosed
from torchmix.formats.kept_ids import in_place_of
from torchmix.formats.source import FormatSource, PageSource
from torchmix.native.load import is_native
from torchmix.reader.locate import Located, Locator
from torchmix.reader.mapped_files import CHECK_EVERY_S, MappedTokens
from torchmix.reader.open_documents import OpenDocuments
from torchmix.reader.open_files import Descriptors, OpenFiles
from torchmix.reader.page_cache import CacheRoom, Companion, DecodedPage, DecodeFigures, PageCache, UsedRows
from torchmix.reader.page_store import PageStore
from torchmix.reader.piece_copy import (
    IdCheck,
    NativeCopy,
    PageRuns,
    PieceCopy,
    Scratch,
    fill_from,
    tables_without_labels,
    unlabelled_places,
    write_padding,
)
from torchmix.reader.protocol import Filled, Filling, StepItems, Tokens, WantedPieces
from torchmix.reader.row_encoding import RowEncoding
from torchmix.reader.source_pages import BATCH_BYTES, SourcePages, decoders_of

AT_ONCE_BYTES = 4 << 20
"""Decoded pages that wait to be copied together."""
COMPANION_BYTES = 128 << 20
"""Companions kept, of all sources together."""


class Reader:
    """Reads any piece of any source of a catalog."""

    def __init__(
        self,
        catalog: Catalog,
        directory: Path,
        *,
        cache_bytes: int,
        room: CacheRoom | None = None,
        sources: Mapping[str, FormatSource] | None = None,
        ids: IdLimit | None = None,
        masked: Collection[str] = (),
        seed: int = 0,
        maps: Mapping[str, str] | None = None,
        items: StepItems | None = None,
        used: Mapping[str, NDArray[np.integer[Any]]] | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            catalog: Its sources are numbered in its order, by sorted name.
            directory: The recipe's folder; paths of files are relative to it.
            cache_bytes: Bytes of decoded pages kept, for all sources together.
            room: Shared with other readers of the process, which then keep no more than this together.
            sources: How each source is read, by name; by default as the catalog says, or from ids kept by the index.
            ids: The bound that all ids must be below; by default ids of a .bin may be any.
            masked: Names of sources whose pages may be damaged: each token of such a page is given as `NO_ID`.
            seed: The recipe's, for maps of rows that are random.
            maps: The words of the map of each source that has one, by name, as the recipe has them.
            items: Reads items of these sources; closed with this reader.
            used: By name, of sources of which no other rows are asked for, these rows; see `used_rows`.

        Raises:
            CatalogStale: The catalog holds lengths of another transform, for example of another tokenizer.
            RecipeError, SourceUnreadable: A tokenizer cannot be opened here.
        """
        self._descriptors = Descriptors()
        companions: PageCache[tuple[str, int], Companion] = PageCache(COMPANION_BYTES)
        self._sources: list[SourcePages] = []
        self._figures = DecodeFigures()
        decoders = decoders_of(catalog, directory, sources, maps=maps)
        for source, reads in zip(catalog.sources.values(), decoders, strict=True):
            decoder: PageSource = reads
            if sources is None and decoder.row_encoder is not None:
                source, decoder = in_place_of(source, catalog.directory) or (source, decoder)
            files = OpenFiles(decoder, source.files, directory, self._descriptors)
            masks_bad = source.name in masked
            pages = SourcePages(source, decoder, files, companions, masks_bad=masks_bad, figures=self._figures)
            self._sources.append(pages)
        number = {source.catalog.name: s for s, source in enumerate(self._sources)}
        of_source = {number[name]: UsedRows(rows, catalog.sources[name]) for name, rows in (used or {}).items()}
        self._store = PageStore(self._sources, cache_bytes=cache_bytes, room=room, used=of_source)
        self._open = OpenDocuments()
        self._encoding = RowEncoding(self._sources, self._open, seed=seed)
        self._locator = Locator([source.catalog for source in self._sources])
        self._checked_s = time.monotonic()
        num_files = sum(len(source.catalog.files) for source in self._sources)
        self._mapped = MappedTokens([source.mapped for source in self._sources], self._locator.first_file, num_files)
        self._ids = None if ids is None else IdCheck([source.catalog for source in self._sources], ids)
        self._scratch = Scratch()
        self.items = items
        self._without_labels = tables_without_labels([source.catalog for source in self._sources])
        self._closed = False
        self._bytes_served = self._bytes_mapped = self._cache_hits = self._cache_misses = 0

    def read(self, pieces: WantedPieces, *, scratch: Scratch | None = None) -> Tokens:
        """Tokens of n pieces, and the successor of each.

        Args:
            pieces: What is wanted.
            scratch: Holds the result; by default the reader's own.

        Raises:
            SourceChanged, SourceUnreadable: A file is not the indexed one, cannot be read, or holds an id outside the
                vocabulary.
            CorruptPage: A page does not decode, or to other documents than were indexed; a row has another length.
            PlanError: A piece lies outside its document or source, because the plan belongs to another catalog.
            LoaderClosed: After `close()`.
        """
        return self._tokens(pieces, self._located(pieces), scratch or self._scratch)

    def fill(self, pieces: WantedPieces, outs: Sequence[Filling], *, pads: bool = True) -> Filled:
        """Write tokens and labels of n pieces to their places.

        Args:
            pieces: What is wanted; places ascend.
            outs: Memory for all places, end to end.
            pads: Whether to write the padding between pieces.

        Raises:
            SourceChanged, SourceUnreadable, CorruptPage, PlanError, LoaderClosed: As `read`.
        """
        at = self._located(pieces)
        if pads:
            write_padding(pieces, outs)
        if is_native():
            copy = self._copy_natively(pieces, at, outs=outs)
            blank = copy.blank()
        else:
            goes_on = np.empty(len(pieces), np.bool_)
            goes_on[at.order] = at.goes_on
            blank = fill_from(pieces, self._tokens(pieces, at, self._scratch), goes_on, outs)
        unlabelled = unlabelled_places(self._without_labels, pieces)
        return Filled(blank=blank, others=self._encoding.others, unlabelled=unlabelled)

    def _located(self, pieces: WantedPieces) -> Located:
        """Where the pieces lie; files that can be mapped are."""
        self._check_open()
        self._check_mapped()
        pieces.check_places()
        while True:
            at = self._locator.locate(pieces, token_bytes=self._mapped.token_bytes)
            if self._mapped.open(at.source, at.page, at.file):
                return at

    def _tokens(self, pieces: WantedPieces, at: Located, scratch: Scratch) -> Tokens:
        if is_native():
            natively = self._copy_natively(pieces, at, scratch=scratch)
            values, behind = natively.out, natively.successors
        else:
            places = pieces.places[at.order]
            copy = PieceCopy(
                sizes=at.tokens, places=places, goes_on=at.goes_on, num_places=pieces.num_places, scratch=scratch
            )
            self._copy(pieces, at, copy)
            values, behind = copy.out, np.array(copy.successors, np.int64)
            if self._ids is not None:
                self._ids.check(at, places, values, behind)
        successors = np.empty(len(at.order), np.int64)
        successors[at.order] = behind
        return Tokens(
            values=values,
            successors=successors,
            others=self._encoding.others,
            unlabelled=unlabelled_places(self._without_labels, pieces),
        )

    def _copy_natively(
        self,
        pieces: WantedPieces,
        at: Located,
        *,
        outs: Sequence[Filling] | None = None,
        scratch: Scratch | None = None,
    ) -> NativeCopy:
        copy = NativeCopy(
            at,
            pieces.places[at.order],
            outs=outs,
            num_places=pieces.num_places,
            scratch=scratch,
            limits=None if self._ids is None else self._ids.limits(at),
        )
        self._copy(pieces, at, copy)
        copy.check_limits(self._ids)
        return copy

    def _copy(self, pieces: WantedPieces, at: Located, copy: PieceCopy | NativeCopy) -> None:
        """Copy all pieces of a call: from mapped files, rests of open documents, kept pages, pages decoded now, and
        rows encoded now."""
        copy.add_mapped(at, self._mapped)
        self._encoding.others = ()
        if len(at.order) and at.file.min() < 0:
            self._copy_pages(pieces, at, copy)
        copy.copy_added()
        self._bytes_served += copy.num_bytes
        self._bytes_mapped += int((at.tokens * self._mapped.token_bytes[at.source]).sum())

    def _copy_pages(self, pieces: WantedPieces, at: Located, copy: PieceCopy | NativeCopy) -> None:
        is_served, rests = self._open.begin(at, self._encoding.is_encoded)
        to_encode, of_kept = self._encoding.begin(at, pieces.epoch)
        for run in (*rests, *of_kept):
            copy.add(run)
        is_encoded = self._encoding.is_encoded[at.source[at.first_piece]]
        is_needed = ~is_encoded & (at.file[at.first_piece] < 0) & ~is_served | to_encode.needs_page
        page_runs = PageRuns(at, is_needed, self._open)
        encoded_page = np.where(is_encoded, np.arange(len(is_encoded)), -1)[is_needed].tolist()
        keys = page_runs.page + self._store.first_key[page_runs.source]

        def add(k: int, page: DecodedPage) -> None:
            if encoded_page[k] >= 0:
                self._encoding.gather(to_encode, encoded_page[k], int(page_runs.source[k]), page)
            else:
                copy.add_page(page_runs, k, page)

        self._store.await_pages(keys)
        missing: list[int] = []
        for k, kept in enumerate(self._store.kept.use_all(keys.tolist())):
            if kept is None:
                missing.append(k)
            else:
                add(k, kept)
        self._cache_hits += len(keys) - len(missing)
        self._cache_misses += len(missing)
        copy.copy_added()  # before anything is decoded: decoding may push these pages out
        num_bytes = 0
        for k, page in zip(missing, self._store.decode(keys[missing]), strict=True):
            add(k, page)
            num_bytes += page.num_bytes
            if num_bytes >= AT_ONCE_BYTES:
                copy.copy_added()
                num_bytes = 0
        for run in self._encoding.encode(at, to_encode):
            copy.add(run)

    def page(self, source: int, page: int) -> DecodedPage:
        """A whole page, not copied; of rows that are encoded, encoded each time.

        Args:
            source: Index of the source, by sorted name.
            page: Page of it.

        Raises:
            SourceChanged, SourceUnreadable, CorruptPage, LoaderClosed: As `read`.
        """
        self._check_open()
        key = int(self._store.first_key[source]) + page
        self._store.await_pages([key])
        found = self._store.kept.use(key)
        if found is None:
            self._cache_misses += 1
            [found] = self._store.decode(np.array([key]))
        else:
            self._cache_hits += 1
        if self._encoding.is_encoded[source]:
            first_row = int(self._sources[source].catalog.pages.place(np.array([page])).first_row[0])
            found = self._encoding.whole_page(source, first_row, found)
        self._bytes_served += found.values.nbytes
        self._bytes_mapped += found.values.nbytes if found.is_view else 0
        return found

    def pages_at_once(self, source: int) -> int:
        """How many pages of a source, 1 or more, are worth one call of `warm`: they are decoded together."""
        table = self._sources[source].catalog.pages
        return max(1, BATCH_BYTES * table.num_pages // max(1, int(table.chunk_bytes.sum())))

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """Decode pages ahead of need, as many as fit the cache without pushing anything out.

        Pages in stores are only requested here. A later call for this source decodes them, once their bytes have come
        or when they are needed.

        Args:
            source: Index of the source, by sorted name.
            page_ids: [k] pages of it, in the order of need; pages already kept are skipped.

        Raises:
            SourceChanged, SourceUnreadable, CorruptPage, LoaderClosed: As `read`.
        """
        self._check_open()
        if self._sources[source].mapped.is_possible:
            self._sources[source].will_need(page_ids)
            return
        self._store.warm(source, page_ids)

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """Name the documents that continue after the next `read`: their rests are kept beside the page cache.

        Args:
            source: [n] index of the source, by sorted name.
            rows: [n] row of the source.
            starts: [n] the first token that comes after the next `read`.
        """
        self._open.follow(source, rows, starts)

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """Drop pages that are not needed soon, such as those of a finished window, to make room for `warm`."""
        self._store.forget(source, page_ids)
        self._mapped.forget(source)

    def planned_bytes(self, source: int, page_ids: Int64Array) -> list[int]:
        """Memory that each page takes while it is kept; 0 of mapped files, which are the kernel's."""
        if self._sources[source].mapped.is_possible:
            return [0] * len(page_ids)
        return self._store.planned_bytes(source, page_ids)

    def expect(self, stream: int, pages: Sequence[tuple[int, Int64Array | None]]) -> None:
        """Do nothing: all pages are read here."""

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """Note that a window with these pages has ended; None: a window with all pages. Only `stats` uses it."""
        self._store.count.end_window(source, page_ids)

    def stats(self) -> dict[str, int | float]:
        """Figures since the reader was made.

        Returns:
            bytes_read: bytes read from files, without footers; for mapped files, bytes served.
            bytes_decoded, bytes_served: bytes of tokens, 1 to 8 each as they are kept; equal for mapped files. For
                rows that are encoded, the bytes of texts, and of their ids.
            decode_amplification: pages decoded over distinct pages of their window; see page_cache.py.
            pages_decoded: pages decoded, ahead of need or not; bad_pages: pages of masked sources that did not decode.
            rows_encoded, rows_served: rows that were encoded, each time, and rows to encode whose first token was asked
                for; bad_rows: of masked sources, rows that could not be encoded as they were indexed.
            cache_hits, cache_misses: pages of a call that were kept, and pages that had to be decoded.
            cache_bytes, cache_pages, open_document_bytes, files_open: current values.
            total_read_s, total_decode_s: seconds spent on files that are not mapped.
        """
        figures = self._figures
        return {
            "bytes_read": self._bytes_mapped + figures.bytes_read,
            "bytes_decoded": self._bytes_mapped + figures.bytes_decoded,
            "bytes_served": self._bytes_served,
            "decode_amplification": self._store.count.amplification,
            "pages_decoded": figures.pages_decoded,
            "bad_pages": figures.bad_pages,
            "cache_hits": self._cache_hits,
            "cache_misses": self._cache_misses,
            "cache_bytes": self._store.kept.num_bytes,
            "cache_pages": len(self._store.kept),
            "rows_encoded": self._encoding.rows_encoded,
            "rows_served": self._encoding.rows_served,
            "bad_rows": self._encoding.num_masked_rows,
            "open_document_bytes": self._open.num_bytes,
            "files_open": len(self._descriptors),
            "total_read_s": figures.read_s,
            "total_decode_s": figures.decode_s,
        }

    def close(self) -> None:
        """Close all files and drop all pages; may be called again."""
        self._closed = True
        if self.items is not None:
            self.items.close()
        self._store.close()
        self._descriptors.close_all()
        self._open.clear()
        for source in range(len(self._sources)):
            self._mapped.forget(source)

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderClosed("the reader was used after close(); make a new one")

    def _check_mapped(self) -> None:
        """Check from time to time that mapped files are still the indexed ones; see mapped_files.py."""
        if time.monotonic() - self._checked_s >= CHECK_EVERY_S:
            self._mapped.check()
            self._checked_s = time.monotonic()
