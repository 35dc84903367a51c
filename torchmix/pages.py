"""Pages and rows of some files, and orders of them, for other people's loaders: reading without a recipe."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain, count, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, SupportsIndex, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from torchmix.catalog.settings import SourceSettings, settings_of
from torchmix.catalog.store import open_catalog
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale, OptionError, RecipeError
from torchmix.formats.table import choose_source
from torchmix.indexing.file_changes import ProgressLines
from torchmix.indexing.scan import update_catalog
from torchmix.indexing.scan_files import Progress
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.windows import Method
from torchmix.reader.piece_copy import Scratch
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.build import one_of, true_or_false, whole_number
from torchmix.recipe.checks import check_catalog_folder, check_shuffle, check_source
from torchmix.recipe.load import check_types
from torchmix.recipe.structs import Read, Shuffle, Source
from torchmix.storage.stores import is_uri
from torchmix.transform.bytes_tokenizer import BYTES_ALONE
from torchmix.transform.open_tokenizer import Tokenizers

# --- Documents -> an Arrow array of rows.
#
# A row of tokens without any is an empty list, whatever the file has; a text is the file's, byte for byte, and a null
# where the file has one. Cost: no copy.


def token_rows(values: NDArray[np.integer[Any]], offsets: NDArray[np.int64]) -> pa.LargeListArray:
    """Lists of integers over the memory of `values`; document i is `values[offsets[i]:offsets[i + 1]]`."""
    return pa.LargeListArray.from_arrays(_array(offsets), _array(values))


def text_rows(content: NDArray[np.uint8], offsets: NDArray[np.int64], is_valid: NDArray[np.bool_]) -> pa.Array:
    """Texts over the memory of `content`: text i is `content[offsets[i]:offsets[i + 1]]`, null unless it is valid."""
    num_null = len(is_valid) - int(np.count_nonzero(is_valid))
    validity = pa.py_buffer(np.packbits(is_valid, bitorder="little")) if num_null else None
    return pa.LargeStringArray.from_buffers(
        len(is_valid), pa.py_buffer(offsets), pa.py_buffer(content), validity, num_null
    )


def _array(values: NDArray[np.integer[Any]]) -> pa.Array:
    """The same memory as an Arrow array; `pa.array` would try pandas first."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


# --- Errors that speak of recipes and commands -> the same errors in the words of `open_pages`.
#
# The facts in a message stay.

AGAIN = "open them with open_pages(..., update=True)"
"""What `torchmix index` is for a user who has no recipe."""
COMMAND = re.compile(
    r"run `?torchmix index`?( again| to build (it|the catalog)( again)?| to add them| with this recipe)?"
)


@contextmanager
def in_words_of_pages(name: str) -> Iterator[None]:
    """Reword the errors of a block.

    Args:
        name: The name of the files in the index: the source of the recipe that stands for them.
    """
    try:
        yield
    except CatalogError as error:
        error.args = (COMMAND.sub(AGAIN, error.message), *error.args[1:])
        raise
    except RecipeError as error:
        raise OptionError(f"open_pages: {_argument(error.where, name)}{error.message}") from None


def _argument(where: str, name: str) -> str:
    """`tokens: ` for `sources.pages.tokens`; nothing for the whole source, whose faults name their arguments."""
    argument = where.removeprefix(f"sources.{name}").lstrip(".").removeprefix("shuffle.").removeprefix("read.")
    return f"{argument}: " if argument else ""


# --- Row numbers as a user gives them -> an array of them.
#
# Every number is a row that there is; what is no whole number is an error, and is never rounded. Cost: one pass over
# them.


def row_numbers(rows: ArrayLike, num_rows: int) -> NDArray[np.int64]:
    """The row numbers that `rows` means.

    Args:
        rows: One whole number, [n] of them, or a mask: [num_rows] bools.
        num_rows: N, rows that there are.

    Returns:
        [n] of [0, N).

    Raises:
        OptionError: Other values or shapes.
        IndexError: There is no such row.
    """
    try:
        given = np.asarray(rows)
    except (TypeError, ValueError) as error:  # lists of several lengths
        raise OptionError(f"rows: {error}; give whole numbers, or a mask of {num_rows} bools") from error
    if given.ndim > 1:
        raise OptionError(f"rows have the shape {given.shape}; give one axis, as rows.ravel() has")
    if given.dtype == np.bool_:
        if given.shape != (num_rows,):
            text = f"rows are a mask of the shape {given.shape}; a mask has one bool for each of the {num_rows} rows"
            raise OptionError(text)
        return np.flatnonzero(given).astype(np.int64, copy=False)
    if given.size == 0:  # NumPy makes float64 of an empty list
        return np.zeros(0, np.int64)
    numbers = np.atleast_1d(given)
    if numbers.dtype == object and all(type(number) is int for number in numbers):  # some are beyond 64 bits
        raise _no_such_row(next(number for number in numbers if not 0 <= number < num_rows), num_rows)
    if not np.issubdtype(numbers.dtype, np.integer):
        text = (
            f"rows are {numbers.dtype}, the first is {numbers[0]!r}; give whole numbers, or a mask of {num_rows} bools"
        )
        raise OptionError(text)
    is_wrong = (numbers < 0) | (numbers >= num_rows)
    if is_wrong.any():
        raise _no_such_row(int(numbers[np.argmax(is_wrong)]), num_rows)
    return numbers.astype(np.int64, copy=False)


def _no_such_row(row: int, num_rows: int) -> IndexError:
    return IndexError(f"row {row}: the files have {num_rows} rows, from 0 on")


# --- The rows of one epoch, window by window.
#
# Over all windows every row comes exactly once; any window can be asked alone, so a reader resumes from three numbers:
# epoch, window, rows of it already used.


class RowOrder:
    """A sequence of windows: `len(order)` of them, `order[w]` the rows of one, `for rows in order` all in turn."""

    def __init__(self, order: SourceOrder, epoch: int) -> None:
        self._order = order
        self._epoch = epoch

    def __len__(self) -> int:
        """Windows of the epoch."""
        return self._order.num_windows

    def __getitem__(self, window: SupportsIndex) -> NDArray[np.int64]:
        """Rows of a window in [0, len(self)), in the order in which to use them.

        Raises:
            IndexError: There is no such window.
            OptionError: It is no whole number.
        """
        window = whole_number("permuted_order", "window", window, -(2**63))
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of an epoch of {len(self)}")
        return self._order.window(self._epoch, window).rows


# --- The rows of epochs in permuted order, some at a time, without end or for some epochs: what a loader's loop takes.
#
# Several readers take windows in turn, so that all together give every row of an epoch once; a batch lies in
# one window, and any number of rows of it given away is a place to begin at again. Pages of the coming window, that of
# the next epoch too, are decoded while rows of this one are given, a few after each batch, so a border costs nothing;
# pages that are done with make room.


class Place(NamedTuple):
    """Where a reader of rows is: three numbers that a checkpoint can keep."""

    epoch: int
    window: int
    """Windows of this epoch that this reader has finished."""
    used: int
    """Rows of the next window that were given out."""


class RowBatch(NamedTuple):
    """Some rows of one window."""

    rows: pa.Array
    """[n] as `Pages.read_rows` gives them."""
    numbers: NDArray[np.int64]
    """[n] number of each row among all rows of the files."""
    place: Place
    """Place of the first row; `place_after(k)` is the place after k rows."""

    def place_after(self, count: int) -> Place:
        """Where to begin again when the first `count` rows, in [0, n], have been used.

        Raises:
            OptionError: The batch has fewer rows, or the count is no whole number.
        """
        used = whole_number("place_after", "count", count, 0, len(self.numbers))
        return self.place._replace(used=self.place.used + used)


class _EpochWindow(NamedTuple):
    place: Place
    """Place of its first row."""
    number: int
    """Number of the window in its epoch."""


def row_batches(
    order: SourceOrder,
    reader: Reader,
    read: Callable[[NDArray[np.int64]], pa.Array],
    *,
    rows: int,
    start: Place,
    epochs: int | None,
    reader_index: int,
    num_readers: int,
) -> Iterator[RowBatch]:
    """Rows in order, from a place on; arguments as of `Pages.batches`, which checks them.

    Args:
        order: The order of the one source of `reader`.
        reader: Decodes ahead what `read` will need.
        read: Reads rows of a window.
        rows: The number of rows of a batch; the last one of a window may have fewer.
        start: Where to begin.
        epochs: Before which epoch to end; None: never.
        reader_index, num_readers: Which of the windows are taken.
    """
    if not order.sizes.num_documents:
        return  # epochs without rows would never end
    mine = range(reader_index, order.num_windows, num_readers)
    windows = (
        _EpochWindow(Place(epoch, done, 0), mine[done])
        for epoch in (count(start.epoch) if epochs is None else range(start.epoch, epochs))
        for done in range(start.window if epoch == start.epoch else 0, len(mine))
    )
    used = start.used
    at_once = min(reader.pages_at_once(0), max(1, order.sizes.window_pages // 4))
    for here, following in pairwise(chain(windows, [None])):
        assert here is not None
        numbers = order.window(here.place.epoch, here.number).rows
        coming = _pages_ahead(order, following)
        num_warmed = 0
        for begin in range(used, len(numbers), rows):
            part = numbers[begin : begin + rows]
            yield RowBatch(rows=read(part), numbers=part, place=here.place._replace(used=begin))
            due = -(-len(coming) * (begin + len(part)) // len(numbers))
            if due > num_warmed:
                stop = min(due + at_once - 1, len(coming))
                with suppress(CatalogError):  # the call that needs the page raises it
                    reader.warm(0, coming[num_warmed:stop])
                num_warmed = stop
        if order.method == "page":
            done = order.pages(here.place.epoch, here.number)
            reader.forget(0, np.setdiff1d(done, coming))
            reader.end_window(0, done)
        elif following is None or following.place.epoch != here.place.epoch:
            reader.end_window(0, None)
        used = 0


def _pages_ahead(order: SourceOrder, window: _EpochWindow | None) -> NDArray[np.int64]:
    """Pages to decode before a window begins, ascending: pages of a chunk are decoded together."""
    # Other methods need as many new pages for any batch as for any other.
    if window is None or order.method != "page":
        return np.zeros(0, np.int64)
    return order.pages(window.place.epoch, window.number)


# --- Pages and rows of some files, and orders of them: what torchmix knows of reading, without a recipe.
#
# What is read is what was indexed, or an error that names file, page and row; the index is shared by all processes
# that open it. Cost: opening maps the index; a page costs reading and decoding of its bytes alone.
#
# A `Pages` belongs to one thread at a time. `copy.copy(pages)` gives another thread its own, and so does pickling, as
# a DataLoader does for spawned workers: files and decoded pages are not shared, the index is.

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
            rows: The number of rows of a batch, 1 or more; the last batch of a window may have fewer.
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
        wanted = WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=lengths.astype(np.int64))
        with self._in_words_of_pages():
            found = self._reader.read(wanted, scratch=Scratch())
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


# --- open_pages: some files -> their pages, without a recipe.
#
# The index is built once, and is one that a recipe with the same name, files and column can share; a fault is said in
# the words of this call. Cost: the first call scans the files, later ones map the index.

logger = logging.getLogger(__name__)


def open_pages(
    path: str | Path | Sequence[str | Path],
    *,
    catalog: str | Path,
    tokens: str | None = None,
    text: str | None = None,
    tokenizer: str = "bytes",
    begin_id: int | str | None = None,
    end_id: int | str | None = None,
    format: str | None = None,
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
        tokens: Column of integer lists, of any integers. Exactly one of `tokens` and `text`, but with Megatron's files.
        text: Column of strings.
        tokenizer: For `text`: `tiktoken:NAME` or the path of a tokenizer.json gives rows of ids; `bytes` gives strings.
        begin_id, end_id: What stands around each text's ids, as in a recipe.
        format: As in a recipe; None: by the files' names.
        name: The name of these files in the index; also keys orders, so other names give other orders.
        cache: Decoded pages kept, as 256MiB or a number of bytes.
        window_pages, window_bytes: How far a row may travel with `method="page"`.
        update: Look for new and changed files, and index them. Rows of files that stay keep their order.
        progress: Called while indexing with bytes done, bytes in all, name and file; None: a line is logged every
            minute.

    Raises:
        OptionError: An argument is of another type than these, out of its range, or goes with no other.
        CatalogStale: The index was made with other arguments; `update=True` makes it again.
        SourceUnreadable, SourceChanged, CorruptPage: As `indexing.scan.update_catalog`.
    """
    paths = _paths(path)
    if not isinstance(catalog, str | os.PathLike):
        raise OptionError(f"open_pages: catalog={catalog!r} must be the path of a folder")
    if progress is not None and not callable(progress):
        raise OptionError(
            f"open_pages: progress={progress!r} must be called, with bytes done, bytes in all, name, file"
        )
    if not isinstance(name, str):
        raise OptionError(f"open_pages: name={name!r} must be text")
    true_or_false("open_pages", "update", update)
    with in_words_of_pages(name):
        where = f"sources.{name}"
        source = check_types(
            Source(
                path=paths,
                format=format,
                tokens=tokens,
                text=text,
                tokenizer=None if text is None else tokenizer,
                begin_id=begin_id,
                end_id=end_id,
            ),
            where,
        )
        shuffle = check_types(Shuffle(window_pages=window_pages, window_bytes=window_bytes), "shuffle")
        cache_bytes = parse_bytes(check_types(Read(cache=cache), "read").cache, where="read.cache")
        check_source(name, source, where)
        check_shuffle(shuffle)
        settings = settings_of({name: source}, shuffle)
        base = Path().absolute()
        if is_uri(os.fspath(catalog)):
            raise OptionError(f"open_pages: catalog={catalog!r} lies in a store; name a folder of this machine")
        catalog_folder = base / check_catalog_folder(os.fspath(catalog))

        def index() -> None:
            lines = ProgressLines(logger.warning, only_long=True)  # where there is no `progress` and it takes long
            update_catalog(catalog_folder, settings, base, progress=progress or lines, any_rows=True)
            lines.end()

        def opened() -> Pages:
            return Pages(name, settings[name], catalog_folder=catalog_folder, base=base, cache_bytes=cache_bytes)

        if update:
            index()
        try:
            return opened()
        except CatalogMissing:
            index()
            return opened()


def _paths(path: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """The patterns of the files, as text."""
    paths = (path,) if isinstance(path, str | Path) else path
    if not isinstance(paths, Sequence) or not all(isinstance(one, str | os.PathLike) for one in paths):
        raise OptionError(f"open_pages: path={path!r} must be a path or a glob, or a list of them")
    return tuple(os.fspath(one) for one in paths)
