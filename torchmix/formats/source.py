"""What every kind of source gives: a scan of each file, and the documents of a run of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.manifest import MOST_ID, BadRows, IdRange, ListBytes
from torchmix.catalog.page_table import PageColumns
from torchmix.catalog.sizes import Column, TokenRuns
from torchmix.storage.find_files import find_files
from torchmix.storage.random_access import RandomAccessFile
from torchmix.transform.tokenizer import RowEncoder

# --- Token ids of some rows -> the smallest, the largest, and the first that no model has.
#
# What is seen does not depend on how a file is cut into parts. Cost: two passes over the ids, 0.2 to 0.5 ns an id
# each; a look for the row only where an id is outside.


class OutsideId(NamedTuple):
    """An id below 0 or above MOST_ID."""

    row: int
    """Row of the file."""
    token: int
    """The id."""


class SeenIds(NamedTuple):
    """What is kept of the ids of some rows."""

    range: IdRange
    """The smallest and the largest."""
    outside: OutsideId | None
    """The first one that no model has."""


def see_ids(values: NDArray[np.integer[Any]], offsets: NDArray[np.int64], first_row: int) -> SeenIds | None:
    """Look at the ids of some rows.

    Args:
        values: [tokens] of all rows, end to end.
        offsets: [rows + 1] where each row begins in them.
        first_row: Row of the file that the first one is.

    Returns:
        None where there are no ids.
    """
    if not len(values):
        return None
    found = IdRange(int(values.min()), int(values.max()))
    if found.smallest >= 0 and found.largest <= MOST_ID:
        return SeenIds(found, None)
    place = int(np.argmax((values < 0) | (values > MOST_ID)))
    row = int(np.searchsorted(offsets, place, side="right")) - 1
    return SeenIds(found, OutsideId(first_row + row, int(values[place])))


def join_seen(parts: Iterable[SeenIds | None]) -> SeenIds | None:
    """The same of several parts of a file, in the order of its rows; None where none has ids."""
    seen = [part for part in parts if part is not None]
    if not seen:
        return None
    return SeenIds(
        IdRange(min(part.range.smallest for part in seen), max(part.range.largest for part in seen)),
        next((part.outside for part in seen if part.outside is not None), None),
    )


# --- The protocol of a source.
#
# Both are pure functions of the file's bytes and the source's settings, and each document has exactly the number of
# tokens that `scan` found: as `decode` gives it, or once `row_encoder` has encoded it. Cost: a scan reads and decodes
# the column once; `decode` touches only the bytes it is given, so the caller decides what is read, kept, or read
# ahead.


class Documents(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Consecutive documents as a file holds them, end to end; document i is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[np.integer[Any]]
    """Token ids of any integer dtype, or the bytes of texts as uint8, [offsets[-1]]; may be read-only."""
    offsets: Int64Array
    """[documents + 1], starts at 0, never falls. A null row is a document of no tokens."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def offsets_of(tokens: Int32Array) -> Int64Array:
    """[documents + 1] where each document begins; `tokens` are those of each."""
    offsets = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum(tokens, out=offsets[1:])
    return offsets


class FileScan(PageColumns, frozen=True, kw_only=True, eq=False):
    """One file as the catalog keeps it: its pages, one or more whole pages of the writer each, up to the next one in
    which a row begins; and its N documents."""

    num_bytes: int
    """Size of the file."""
    footer_hash: str
    """32 hex digits: the file's identity, with its size."""
    num_rows: int
    """N; equals `page_rows.sum()` and `len(tokens)`."""
    tokens: Int32Array
    """[N], tokens of each document."""
    schema: bytes
    """What `decode` must know of the file beside its pages; opaque to all but the source."""
    split_pages: int = 0
    """Pages of the writer that begin inside a row."""
    whole_chunks: bool = False
    """Some page is all of a large chunk, of which no part can be read alone."""
    ids: SeenIds | None = None
    """What was seen of the token ids; None where there are none, or they are not looked at before they are read."""
    bad: BadRows | None = None
    """Rows that could not be read and have no tokens; None where that was not allowed."""
    lists: ListBytes | None = None
    """What a map gives beside ids; None where there is nothing."""
    is_quick: bool = False
    """Scanning it again costs no more than keeping it for a run that is killed."""
    sizes: Mapping[str, Column] = msgspec.field(default_factory=dict)
    """[N] other sizes of each document, by name; most formats measure none."""
    items: Mapping[str, TokenRuns] = msgspec.field(default_factory=dict)
    """Items inside the documents, such as images, by kind; most formats have none."""
    marks: Mapping[str, TokenRuns] = msgspec.field(default_factory=dict)
    """What is known of tokens of documents beside their items, by name; most formats have none."""


def scan_of_no_rows(num_bytes: int, footer_hash: str, bad: BadRows | None) -> FileScan:
    """The scan of a file without rows, whatever types its columns have: a writer that saw no value may write any."""
    none = np.zeros(0, np.int64)
    return FileScan(
        num_bytes=num_bytes,
        footer_hash=footer_hash,
        num_rows=0,
        chunk_of_page=none,
        page_offset=none,
        page_bytes=none,
        page_rows=none,
        page_crc=np.zeros(0, np.uint32),
        kind=np.zeros(0, np.int8),
        tokens=np.zeros(0, np.int32),
        schema=b"",
        bad=bad,
    )


class PageRun(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One page, or several adjacent ones of the same column chunk, as bytes read from a file."""

    pages: bytes | memoryview
    """Bytes of the pages: `page_bytes` summed over the run, from the `page_offset` of its first, and the `tail_bytes`
    of its last."""
    companion: bytes | memoryview
    """Bytes of the chunk's companion; empty if it has none."""
    schema: bytes
    """`FileScan.schema` of the file."""
    kind: int
    """`FileScan.kind` of the chunk."""
    num_rows: int
    """Sum of `page_rows`."""
    path: str
    """The file; with `offset` and `first_row` only for messages."""
    offset: int
    """`page_offset` of the first page."""
    first_row: int
    """Row of the file at which the run begins."""
    tokens: Int32Array | None = None
    """[num_rows] tokens of each document, as the catalog has them; None while a file is scanned."""
    offsets: Int64Array | None = None
    """[num_rows + 1] where each document begins, by `tokens`; may be a part of `Documents`."""
    begins_inside_row: bool = False
    """What the first page begins with belongs to the row before, and is dropped."""
    rows_behind: int = 0
    """Rows that begin in the last one's tail, and are dropped."""
    memo: dict[str, bytes] | None = None
    """What `decode` may keep of the companion for other runs of the chunk, as unpacked values; None: nothing."""
    has_bad_rows: bool = False
    """Rows of the file could not be read when it was indexed: those without tokens are not to be looked at."""
    is_as_indexed: bool = False
    """Pages, tails and companion were compared with the checksums that they were indexed with, so that they are bytes
    that decoded then, and `tokens` is what they hold."""


class PageSource(Protocol):
    """How the pages of one source become documents. Safe to share between threads."""

    @property
    def name(self) -> str:
        """The source's name in the recipe."""

    @property
    def format(self) -> str:
        """Its row of the table of formats, or `kept ids`."""

    @property
    def row_encoder(self) -> RowEncoder | None:
        """What turns the rows that `decode` gives into tokens; None where they are tokens."""

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """Size in bytes and `footer_hash` of an open file, from what describes the rest alone, as its last bytes.

        `path` is where it lies.

        Raises:
            SourceUnreadable: the file has no whole footer.
        """

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """The documents of each run of pages, `run.num_rows` of them, as the file holds them: ids, or bytes of texts.

        Raises:
            CorruptPage: the bytes of a run do not decode, or to another number of rows.
        """


class FormatSource(PageSource, Protocol):
    """One source of the recipe: how its files are indexed, too."""

    @property
    def transform_id(self) -> str:
        """What turns a row into tokens, with its version; sizes in the catalog are true for this alone."""

    @property
    def vocab_size(self) -> int | None:
        """Ids of its tokenizer, from 0 on; None where its files hold ids."""

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """Look at what describes a file: whether it can be read, and holds what the source needs.

        `path` is a file of this machine, or as a str the URI of an object; `bad` is as for `scan`.

        Raises:
            SourceUnreadable: no such file or column, a wrong type, or not a file of this kind.
        """

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """Find the pages of a file and the tokens of each of its documents; `path` as for `check`.

        `progress` is called with the bytes of the column that were scanned since the last call. `bad` takes rows that
        cannot be read, which have no tokens then; without it the first one is an error.

        Raises:
            SourceUnreadable: no such file or column, a wrong type, or not a file of this kind; a bad row.
            CorruptPage: a page does not decode; a line that is no JSON.
        """

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """Other columns of a file, with a row for each document that a scan finds, in order; `path` as for `check`.

        Raises:
            SourceUnreadable: No such file or column, or a format without columns.
        """


# --- What a look at one file finds: its columns, and how much of it is what one trains on.

FoundKind = Literal["tokens", "text", "messages", "items", "item paths"]


class FoundColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column that could be trained on."""

    name: str
    kind: FoundKind
    per_byte: float
    """Bytes of text, or number of tokens, for each byte of the file; about. 0 of paths."""
    example: str = ""
    """A value, of a column of paths."""
    items: str = ""
    """The kind of its items; empty: of none."""
    item_tokens: float = 0
    """Tokens of an item by the defaults of a recipe, about; 0 where none was seen."""


# --- A format, as its module says it in `FORMAT`; `table.py` says where the module is.


class FormatRow(msgspec.Struct, frozen=True, kw_only=True):
    """How files of one format are read."""

    look: Callable[[str], Iterator[FoundColumn]]
    """A file -> its columns that one may train on, before there is a recipe."""
    make_source: Callable[..., FormatSource]
    """Called with the keyword `name`, and of a format with columns with `column`, `kind`, `tokenizer` and
    `map`."""
    find: Callable[[str, Sequence[str], Path], list[str]] = find_files
    """Name, patterns and the recipe's folder of a source -> its data files."""
    companion: Callable[[str], str] | None = None
    """Path of a data file -> of the file beside it that its fingerprint covers, too; None where there is none."""
    type_in_file: Callable[[bytes], np.dtype[np.integer[Any]]] | None = None
    """`FileScan.schema` -> type of the tokens of a file that holds all of them as they are, so that it can be
    memory-mapped; None where pages are decoded."""
    scan_reads_tokens: bool = True
    """False where a scan reads no tokens: it is cheap, and ids are compared with the model's when they are read."""
