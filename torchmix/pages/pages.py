"""Files -> an index, pages, rows, and orders of them: what torchmix knows of reading, without a recipe.

In: files, a column, and a folder for the index. Out: `Pages`. Must hold: what is read is what was indexed, or an error
that names file, page and row; the index is built once and shared by all processes that open it. Cost: opening maps the
index; a page costs reading and decoding of its bytes alone.

A `Pages` belongs to one thread at a time. `copy.copy(pages)` gives another thread its own, and so does pickling, as a
DataLoader does for spawned workers: files and decoded pages are not shared, the index is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from torchmix.catalog.store import open_catalog
from torchmix.errors import CatalogMissing, CatalogStale
from torchmix.formats.table import choose_source
from torchmix.indexing.scan import index_recipe
from torchmix.indexing.scan_files import Progress
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.window_rows import Method
from torchmix.pages.arrow_rows import text_rows, token_rows
from torchmix.pages.row_batches import Place, RowBatch, row_batches
from torchmix.pages.row_order import RowOrder
from torchmix.reader.piece_copy import Scratch
from torchmix.reader.reader import Reader
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import RECIPE_VERSION, Batch, Read, Recipe, Shuffle, Source
from torchmix.transform.bytes_tokenizer import BYTES_ALONE
from torchmix.transform.open_tokenizer import Tokenizers


class Pages:
    """The pages and rows of some files, counted through them in the order of the index."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        """Open the one source of a recipe; see `open_pages`."""
        self._recipe, self._directory = recipe, directory
        catalog = open_catalog(recipe, directory)
        self._source = next(iter(catalog.sources.values()))
        cache_bytes = parse_bytes(recipe.read.cache, where="cache")
        self._is_text = self._source.tokenizer == "bytes"
        tokenizers = Tokenizers(directory, for_bytes=BYTES_ALONE)
        paths = [file.path for file in self._source.files]
        sources = {self._source.name: choose_source(self._source.name, self._source, paths, tokenizers)}
        self._reader = Reader(catalog, directory, cache_bytes=cache_bytes, sources=sources)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._recipe, self._directory, self.fingerprint)

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

    def read_page(self, page: int) -> pa.Array:
        """All rows of a page in [0, P).

        Returns:
            A large_list array of integers, or a large_string array. Lists lie in the memory into which the page was
            decoded: `rows.values.to_numpy()` and `torch.from_dlpack(rows.values)` copy nothing. Do not write into it.
            Texts are copied once.

        Raises:
            IndexError: There is no such page.
            SourceChanged, SourceUnreadable: The file is not the indexed one, or cannot be read.
            CorruptPage: The page does not decode, or to other rows than were indexed.
            LoaderClosed: After `close()`.
        """
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page}: the files have {self.num_pages}")
        if self._is_text:  # between texts there is room for their ends
            return self._texts(np.arange(*self.first_row_of_page[page : page + 2]))
        decoded = self._reader.page(0, page)
        return token_rows(decoded.values, np.asarray(decoded.offsets))

    def read_rows(self, rows: ArrayLike) -> pa.Array:
        """Rows, in the order asked, each page of them decoded once.

        Args:
            rows: [n] of [0, N), in any order, also several times.

        Returns:
            [n] as `read_page`, in memory of its own.

        Raises:
            IndexError: There is no such row. Else as `read_page`.
        """
        asked = np.atleast_1d(np.asarray(rows, np.int64))
        if len(asked) and not 0 <= asked.min() <= asked.max() < self.num_rows:
            raise IndexError(f"rows {asked.min()} to {asked.max()}: the files have {self.num_rows}")
        return self._texts(asked) if self._is_text else token_rows(*self._read(asked, self.lengths[asked]))

    def permuted_order(self, *, seed: int, epoch: int = 0, method: Method = "page") -> RowOrder:
        """The rows of an epoch, shuffled; the same on every machine.

        Args:
            seed: In [0, 2^63).
            epoch: 0 or more; each has an order of its own.
            method: `page`: rows of windows of pages from all over are permuted; near a full shuffle, and each page is
                decoded about once. `row`: all rows are permuted; nearly every row costs a page. `none`: as they lie.
        """
        return RowOrder(self._order(seed, method), epoch)

    def batches(
        self,
        *,
        rows: int,
        seed: int,
        method: Method = "page",
        start: Sequence[int] = (0, 0, 0),
        epochs: int | None = None,
        reader: int = 0,
        readers: int = 1,
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
            ValueError: Arguments outside their ranges; more readers than windows, as some would have no rows; a place
                that this reader cannot have come to.
            SourceChanged, SourceUnreadable, CorruptPage, LoaderClosed: As `read_page`, when a batch is taken.
        """
        order = self._order(seed, method)
        place = Place(*start)
        if rows < 1 or not 0 <= reader < readers or min(place) < 0:
            raise ValueError(f"batches: rows={rows}, reader={reader} of readers={readers}, start={tuple(place)}")
        if readers > order.num_windows:
            raise ValueError(
                f"batches: {readers} readers share {order.num_windows} windows, so some would have none; open with "
                "smaller windows (window_pages=, window_bytes=), or use fewer readers"
            )
        mine = range(reader, order.num_windows, readers)
        if place.window >= len(mine) or place.used > order.num_rows(place.epoch, mine[place.window]):
            raise ValueError(
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

    def _order(self, seed: int, method: Method) -> SourceOrder:
        return SourceOrder(self._source.name, self._source.sizes, seed=seed, method=method)

    def _pages_of(self, rows: ArrayLike) -> NDArray[np.int64]:
        pages = np.sort(self._source.pages.page_of_rows(np.asarray(rows, np.int64)))
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


def open_pages(
    path: str | Path | Sequence[str | Path],
    *,
    catalog: str | Path,
    tokens: str | None = None,
    text: str | None = None,
    tokenizer: str = "bytes",
    begin_id: int | str | None = None,
    end_id: int | str | None = None,
    format: Literal["parquet", "megatron", "jsonl", "arrow"] | None = None,
    name: str = "pages",
    cache: str | int = "256MiB",
    window_pages: int = 256,
    window_bytes: str | int = "64MiB",
    update: bool = False,
    progress: Progress | None = None,
) -> Pages:
    """Open some files, and index them first if that was not done.

    Args:
        path: Files or globs; relative ones to the present folder. Any format that a recipe's source may have.
        catalog: Folder of the index; several `name`s may share it.
        tokens: Column of integer lists. Exactly one of `tokens` and `text`, but with Megatron's files.
        text: Column of strings.
        tokenizer: Of `text`: `tiktoken:NAME` or the path of a tokenizer.json gives rows of ids; `bytes` gives strings.
        begin_id, end_id: What stands around each text's ids, as in a recipe.
        format: As in a recipe; None: by the files' names.
        name: Of these files in the index; also keys orders, so other names give other orders.
        cache: Decoded pages kept, as 256MiB or a number of bytes.
        window_pages, window_bytes: How far a row may travel with `method="page"`.
        update: Look for new and changed files, and index them. Rows of files that stay keep their order.
        progress: Called while indexing with bytes done, bytes in all, name and file.

    Raises:
        RecipeError: An argument that no recipe could hold.
        CatalogStale: The index was made with other arguments; `update=True` makes it anew.
        SourceUnreadable, SourceChanged, CorruptPage: As `sources.scan.index_sources`.
    """
    paths = (path,) if isinstance(path, str | Path) else tuple(path)
    source = Source(
        path=tuple(map(str, paths)),
        format=format,
        tokens=tokens,
        text=text,
        tokenizer=None if text is None else tokenizer,
        begin_id=begin_id,
        end_id=end_id,
    )
    recipe = check_recipe(
        Recipe(
            version=RECIPE_VERSION,
            seed=0,
            batch=Batch(samples=1, length=8),
            sources={name: source},
            mixture={name: "100%"},
            catalog=str(catalog),
            shuffle=Shuffle(window_pages=window_pages, window_bytes=window_bytes),
            read=Read(cache=cache),
        )
    )
    directory = Path().absolute()
    if update:
        index_recipe(recipe, directory, progress=progress)
    try:
        return Pages(recipe, directory)
    except CatalogMissing:
        index_recipe(recipe, directory, progress=progress)
        return Pages(recipe, directory)
    except CatalogStale as error:
        raise CatalogStale(f"{error} (here: open_pages(..., update=True))") from error


def _reopen(recipe: Recipe, directory: Path, fingerprint: str) -> Pages:
    pages = Pages(recipe, directory)
    if pages.fingerprint != fingerprint:
        raise CatalogStale(
            f"the index of {', '.join(next(iter(recipe.sources.values())).path)} is another ({pages.fingerprint}) than "
            f"when these pages were opened ({fingerprint}); open them anew"
        )
    return pages
