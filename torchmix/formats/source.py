"""What every kind of source gives: a scan of each file, and the documents of a run of pages.

In: a file, and later bytes of it. Out: `FileScan`, which the catalog keeps, and `Documents`, which become tensors.
Must hold: both are pure functions of the file's bytes and the source's settings, and `decode` gives each document
exactly the number of tokens that `scan` found. Cost: a scan reads and decodes the column once; `decode` touches only
the bytes it is given, so the caller decides what is read, kept, or read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.bad_rows import BadRows
from torchmix.formats.seen_ids import SeenIds
from torchmix.storage.random_access import RandomAccessFile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Documents:
    """Token ids of consecutive documents, end to end; document i is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[np.integer[Any]]
    """Token ids of any integer dtype, [offsets[-1]]; may be read-only."""
    offsets: Int64Array
    """[documents + 1], starts at 0, never falls. A null row is a document of no tokens."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def offsets_of(tokens: Int32Array) -> Int64Array:
    """[documents + 1] where each document begins; `tokens` are those of each."""
    offsets = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum(tokens, out=offsets[1:])
    return offsets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FileScan:
    """One file as the catalog keeps it: P pages in row order, over C column chunks in file order, with N documents."""

    num_bytes: int
    """Size of the file."""
    footer_hash: str
    """32 hex digits: the file's identity, with its size."""
    num_rows: int
    """N; equals `page_rows.sum()` and `len(tokens)`."""
    chunk_of_page: Int32Array
    """[P], in 0 ... C - 1, never falls."""
    page_offset: Int64Array
    """[P], the first byte of the page in the file: its header."""
    page_bytes: Int64Array
    """[P], bytes of the page: one or more whole pages of the writer, up to the next one in which a row begins."""
    page_rows: Int64Array
    """[P], rows that begin in the page, at least 1."""
    tail_bytes: Int64Array | None = None
    """[P], bytes behind the page that must be read with it because its last row ends there, in the first of the
    writer's pages of the next page; 0 where it ends in the page itself. None if it does so in all."""
    dict_offset: Int64Array
    """[C], the first byte of the chunk's dictionary page; -1 if it has none."""
    dict_bytes: Int64Array
    """[C], 0 if it has none."""
    codec: NDArray[np.int8]
    """[C], compression, in the file format's own numbers."""
    tokens: Int32Array
    """[N], tokens of each document."""
    schema: bytes
    """What `decode` must know of the file beside its pages; opaque to all but the source."""
    page_crc: NDArray[np.uint32] | None = None
    """[P], CRC-32 of the bytes of each page and its tail, which is compared when they are read; None for a format whose
    pages are not decoded."""
    dict_crc: NDArray[np.uint32] | None = None
    """[C], of each dictionary page, likewise."""
    split_pages: int = 0
    """Pages of the writer that begin inside a row."""
    whole_chunks: bool = False
    """Some page is all of a large chunk, of which no part can be read alone."""
    ids: SeenIds | None = None
    """What was seen of the token ids; None where there are none, or they are not looked at before they are read."""
    bad: BadRows | None = None
    """Rows that could not be read and have no tokens; None where that was not allowed."""
    is_quick: bool = False
    """Scanning it again costs no more than keeping it for a run that is killed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageRun:
    """One page, or several adjacent ones of the same column chunk, as bytes read from a file."""

    pages: bytes | memoryview
    """Bytes of the pages: `page_bytes` summed over the run, from the `page_offset` of its first, and the `tail_bytes`
    of its last."""
    dictionary: bytes | memoryview
    """Bytes of the chunk's dictionary page; empty if it has none."""
    schema: bytes
    """`FileScan.schema` of the file."""
    codec: int
    """`FileScan.codec` of the chunk."""
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
    """What `decode` may keep of the dictionary for other runs of the chunk, as unpacked values; None: nothing."""
    has_bad_rows: bool = False
    """Rows of the file could not be read when it was indexed: those without tokens are not to be looked at."""
    is_as_indexed: bool = False
    """Pages, tails and dictionary were compared with the checksums that they were indexed with, so that they are bytes
    that decoded then, and `tokens` is what they hold."""


class FormatSource(Protocol):
    """One source of the recipe: its name, and how its files are read. Safe to share between threads."""

    @property
    def name(self) -> str:
        """The source's name in the recipe."""

    @property
    def format(self) -> str:
        """Its row of the table of formats."""

    @property
    def transform_id(self) -> str:
        """What turns a row into tokens, with its version; sizes in the catalog are true for this alone."""

    @property
    def vocab_size(self) -> int | None:
        """Ids of its tokenizer, from 0 on; None where its files hold ids."""

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """Size in bytes and `footer_hash` of an open file, from what describes the rest alone, as its last bytes.

        `path` is where it lies.

        Raises:
            SourceUnreadable: the file has no whole footer.
        """

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

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """The documents of each run of pages, `run.num_rows` of them.

        Raises:
            CorruptPage: the bytes of a run do not decode, or to another number of rows.
        """
