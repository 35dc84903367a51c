"""Pages and rows of some files, and orders of them: what torchmix knows of reading, without a recipe.

In: an index that is there. Out: `Pages`. Must hold: what is read is what was indexed, or an error that names file, page
and row; the index is shared by all processes that open it. Cost: opening maps the index; a page costs reading and
decoding of its bytes alone.

A `Pages` belongs to one thread at a time. `copy.copy(pages)` gives another thread its own, and so does pickling, as a
DataLoader does for spawned workers: files and decoded pages are not shared, the index is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from torchmix.catalog.settings import SourceSettings
from torchmix.catalog.store import open_catalog
from torchmix.errors import CatalogStale, OptionError
from torchmix.formats.table import choose_source
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.window_rows import Method
from torchmix.pages.arrow_rows import text_rows, token_rows
from torchmix.pages.row_batches import Place, RowBatch, row_batches
from torchmix.pages.row_numbers import row_numbers
from torchmix.pages.row_order import RowOrder
from torchmix.pages.wording import in_words_of_pages
from torchmix.reader.pieces.piece_copy import Scratch
from torchmix.reader.reader import Reader
from torchmix.recipe.options import one_of, whole_number
from torchmix.transform.bytes_tokenizer import BYTES_ALONE
from torchmix.transform.open_tokenizer import Tokenizers

MOST = 2**63 - 1
"""The largest seed, and the largest number of an epoch."""


class Pages:
    """The pages and rows of some files, counted through them in the order of the index."""

    def __init__(
        self, name: str, settings: SourceSettings, *, catalog_folder: Path, base: Path, cache_bytes: int
    ) -> None:
        """Open one source of a catalog; see `open_pages`.

        Args:
            name: The source.
            settings: What it was indexed for.
            catalog_folder: Where the catalog lies.
            base: The folder that paths of files are relative to.
            cache_bytes: Decoded pages kept.
        """
        self._arguments = (name, settings, catalog_folder, base, cache_bytes)
        catalog = open_catalog(catalog_folder, {name: settings})
        self._source = catalog.sources[name]
        self._is_text = self._source.tokenizer == "bytes"
        tokenizers = Tokenizers(base, for_bytes=BYTES_ALONE)
        paths = [file.path for file in self._source.files]
        sources = {self._source.name: choose_source(self._source.name, self._source, paths, tokenizers)}
        self._reader = Reader(catalog, base, cache_bytes=cache_bytes, sources=sources)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (*self._arguments, self.fingerprint)

    def __enter__(self) -> Pages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def fingerprint(self) -> str:
        """16 hex digits over the files' identities, column, transform and windows: equal, and so are all orders."""
        return self._source.fingerprint

    @property
    def num_pages(self) -> int:
        """P, pages of all files."""
        return self._source.pages.num_pages

    @property
    def num_rows(self) -> int:
        """N, rows of all files."""
        return self._source.num_documents

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[N] tokens of each row, memory-mapped; of plain text its bytes and 1, and 0 where it is null."""
        return self._source.sizes.tokens

    @property
    def first_row_of_page(self) -> NDArray[np.int64]:
        """[P + 1] page p has the rows `first_row_of_page[p]` to `first_row_of_page[p + 1]`, half-open."""
        return np.asarray(self._source.sizes.first_row_of_page)

    def read_page(self, page: SupportsIndex) -> pa.Array:
        """All rows of a page in [0, P).

        Returns:
            A large_list array of integers, or a large_string array. Lists lie in the memory into which the page was
            decoded: `rows.values.to_numpy()` and `torch.from_dlpack(rows.values)` copy nothing. Do not write into it.
            Texts are copied once.

        Raises:
            IndexError: There is no such page.
            OptionError: It is no whole number.
            SourceChanged, SourceUnreadable: The file is not the indexed one, or cannot be read.
            CorruptPage: The page does not decode, or to other rows than were indexed.
            LoaderClosed: After `close()`.
        """
        page = whole_number("read_page", "page", page, -(2**63))
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page}: the files have {self.num_pages} pages, from 0 on")
        if self._is_text:  # between texts there is room for their ends
            return self._texts(np.arange(*self.first_row_of_page[page : page + 2]))
        with self._in_words_of_pages():
            decoded = self._reader.page(0, page)
        return token_rows(decoded.values, np.asarray(decoded.offsets))

    def read_rows(self, rows: ArrayLike) -> pa.Array:
        """Rows, in the order asked, each page of them decoded once.

        Args:
            rows: [n] of [0, N), in any order, also several times; or a mask, [N] bools.

        Returns:
            [n] as `read_page`, in memory of its own.

        Raises:
            IndexError: There is no such row.
            OptionError: Other values or shapes, as 2.7. Else as `read_page`.
        """
        asked = row_numbers(rows, self.num_rows)
        return self._texts(asked) if self._is_text else token_rows(*self._read(asked, self.lengths[asked]))

    def permuted_order(self, *, seed: SupportsIndex, epoch: SupportsIndex = 0, method: Method = "page") -> RowOrder:
        """The rows of an epoch, shuffled; the same on every machine.

        Args:
            seed: In [0, 2^63).
            epoch: 0 or more; each has an order of its own.
            method: `page`: rows of windows of pages from all over are permuted; near a full shuffle, and each page is
                decoded about once. `row`: all rows are permuted; nearly every row costs a page. `none`: as they lie.

        Raises:
            OptionError: Arguments outside these.
        """
        call = "permuted_order"
        return RowOrder(self._order(call, seed, method), whole_number(call, "epoch", epoch, 0, MOST))

    def batches(
        self,
        *,
        rows: SupportsIndex,
        seed: SupportsIndex,
        method: Method = "page",
        start: Sequence[SupportsIndex] = (0, 0, 0),
        epochs: SupportsIndex | None = None,
        reader: SupportsIndex = 0,
        readers: SupportsIndex = 1,
    ) -> Iterator[RowBatch]:
        """Rows in the order of `permuted_order`, epoch after epoch, read ahead: the loop of a loader.

        Args:
            rows: Of a batch, 1 or more; the last batch of a window may have fewer.
            seed, method: As of `permuted_order`.
            start: A `Place`, or its three numbers: that of a batch, or after some rows of it.
            epochs: Epochs after which to end, counted from the first of all; None: never.
            reader, readers: Number of this reader in [0, readers), where several share an epoch's windows, as the
                workers of all ranks do. A place is that of one reader, and of their number.

        Raises:
            OptionError: Arguments outside their ranges; more readers than windows, as some would have no rows; a place
                that this reader cannot have come to.
            SourceChanged, SourceUnreadable, CorruptPage, LoaderClosed: As `read_page`, when a batch is taken.
        """
        order = self._order("batches", seed, method)
        place = _place(start)
        rows = whole_number("batches", "rows", rows, 1)
        readers = whole_number("batches", "readers", readers, 1)
        reader = whole_number("batches", "reader", reader, 0, readers - 1)
        epochs = None if epochs is None else whole_number("batches", "epochs", epochs, 0)
        if readers > order.num_windows:
            raise OptionError(
                f"batches: {readers} readers share {order.num_windows} windows, so some would have none; open with "
                "smaller windows (window_pages=, window_bytes=), or use fewer readers"
            )
        mine = range(reader, order.num_windows, readers)
        if place.window >= len(mine) or place.used > order.num_rows(place.epoch, mine[place.window]):
            raise OptionError(
                f"batches: start={tuple(place)} is no place of reader {reader} of {readers}, which takes {len(mine)} "
                "windows of an epoch; give the number of readers, and the files, that it is of"
            )
        return row_batches(
            order,
            self._reader,
            self.read_rows,
            rows=rows,
            start=place,
            epochs=epochs,
            reader_index=reader,
            num_readers=readers,
        )

    def warm(self, rows: ArrayLike) -> None:
        """Decode the pages of coming rows now, as many as fit the cache; errors as `read_page`."""
        with self._in_words_of_pages():
            self._reader.warm(0, self._pages_of(rows))

    def forget(self, rows: ArrayLike) -> None:
        """Drop the pages of rows that will not be read soon, as those of a finished window, so that `warm` has room."""
        self._reader.forget(0, self._pages_of(rows))

    def stats(self) -> dict[str, int | float]:
        """Bytes read, pages decoded, decode_amplification and more, since this was opened; see `Reader.stats`."""
        return self._reader.stats()

    def close(self) -> None:
        """Close all files and drop all pages; may be called again."""
        self._reader.close()

    def _in_words_of_pages(self) -> AbstractContextManager[None]:
        return in_words_of_pages(self._source.name)

    def _order(self, call: str, seed: SupportsIndex, method: Method) -> SourceOrder:
        seed = whole_number(call, "seed", seed, 0, MOST)
        method = one_of(call, "method", method, get_args(Method))
        return SourceOrder(self._source.name, self._source.sizes, seed=seed, method=method)

    def _pages_of(self, rows: ArrayLike) -> NDArray[np.int64]:
        pages = np.sort(self._source.pages.page_of_rows(row_numbers(rows, self.num_rows)))
        is_first = np.ones(len(pages), np.bool_)
        np.not_equal(pages[1:], pages[:-1], out=is_first[1:])
        return pages[is_first]  # np.unique takes four times as long for a few hundred rows

    def _texts(self, rows: NDArray[np.int64]) -> pa.Array:
        lengths = self.lengths[rows]
        is_valid = lengths > 0  # a text ends with a token of its own, a null has none
        content, offsets = self._read(rows, lengths - is_valid)
        return text_rows(content.astype(np.uint8, copy=False), offsets, is_valid)

    def _read(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int32]
    ) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """The first so many tokens of each row, end to end, and the offset of each and of the end."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        zeros = np.zeros(len(rows), np.int64)
        with self._in_words_of_pages():
            found = self._reader.read(
                zeros,
                rows,
                zeros,
                lengths.astype(np.int64),
                places=offsets[:-1],
                num_places=int(offsets[-1]),
                scratch=Scratch(),
            )
        return found.values, offsets


def _place(start: Sequence[SupportsIndex]) -> Place:
    """The place of three numbers."""
    try:
        numbers = tuple(start)
    except TypeError:  # one number
        numbers = ()
    if len(numbers) != len(Place._fields):
        raise OptionError(f"batches: start={start!r} must be three whole numbers: {', '.join(Place._fields)}")
    named = zip(Place._fields, numbers, strict=True)
    return Place(*(whole_number("batches", f"start.{name}", number, 0, MOST) for name, number in named))


def _reopen(
    name: str, settings: SourceSettings, catalog_folder: Path, base: Path, cache_bytes: int, fingerprint: str
) -> Pages:
    with in_words_of_pages(name):
        pages = Pages(name, settings, catalog_folder=catalog_folder, base=base, cache_bytes=cache_bytes)
    if pages.fingerprint != fingerprint:
        raise CatalogStale(
            f"the index of {', '.join(settings.patterns)} is another ({pages.fingerprint}) than when these pages were "
            f"opened ({fingerprint}); open them again"
        )
    return pages
