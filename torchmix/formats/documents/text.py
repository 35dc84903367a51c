"""Rows that a template or a list of texts and images makes documents of, as a source.

In: the format's own source of the column, and the sizes of the images of each file. Out: `FileScan` with images, turns
and runs without loss as items; later the ids of any row. Must hold: what encodes a row later has the tokens that the
scan counted, since both take the tokens of each image from its size alone. Cost: that of the texts, and in the catalog
40 bytes an image and 8 a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.bad_rows import BadRows
from torchmix.catalog.items import ItemTable
from torchmix.errors import CatalogError, SourceUnreadable
from torchmix.formats.documents.item_kinds import NO_LOSS, TURN, Runs, roles_of_rows, runs_table, turns_table
from torchmix.formats.documents.roles import RoleNames, fields_of_messages
from torchmix.formats.images.headers import IMAGE
from torchmix.formats.source import Documents, FileScan, FormatSource, PageRun
from torchmix.storage.random_access import RandomAccessFile
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.documents.chat import ChatCutter
from torchmix.transform.documents.lay_out import DocumentLayout, ImagesOfRows
from torchmix.transform.images.header import HEADER_VERSION
from torchmix.transform.images.rule import SizeRule
from torchmix.transform.row_encoder import EncodedRows, RowEncoder, RowsToEncode
from torchmix.transform.tokenizer import Ids, Tokenizer

TableOfFile = Callable[[str], tuple[ItemTable, Mapping[int, str]]]
"""Path of a file -> the images in it, and what is wrong with the bad ones, by number."""
MakeColumn = Callable[[str, Tokenizer], FormatSource]
"""Column and tokenizer -> the format's own source."""


class LaidOutTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `source.FormatSource`."""

    name: str
    column: str
    layout: DocumentLayout
    rule: SizeRule | None
    """The size rule of images; None: there are none."""
    make: MakeColumn
    tables: TableOfFile | None = None
    """Needed for a scan of a source with images."""
    items: Mapping[str, ItemTable] | None = None
    """Items of the source as they were indexed; needed to read."""

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return self._inner().format

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        return (
            f"{self.layout.transform_id}:{'' if self.rule is None else f'sized-{HEADER_VERSION}:{self.rule.rule_id}'}"
        )

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return self.layout.vocab_size

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`; None while a file is scanned, which counts the tokens itself."""
        return None if self.items is None else LaidOutEncoder(self.layout, self.items)

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `FormatSource.fingerprint`."""
        return self._inner().fingerprint(file, path)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `FormatSource.check`; images are not looked at."""
        fields = self._fields(path)
        for column in (self.column,) if fields is None else fields:
            self.make(column, BYTES).check(path, bad)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `FormatSource.scan`.

        Raises:
            CatalogError: The images of the file are not indexed, or are of other rows.
        """
        items: dict[str, ItemTable] = {}
        table, faults = self._images(path)
        images = ImagesOfRows(first_item_of_row=None, tokens=np.zeros(0, np.int64), faults={})
        if table is not None:
            images = ImagesOfRows(
                first_item_of_row=np.asarray(table.first_item_of_row, np.int64),
                tokens=np.asarray(table.tokens, np.int64),
                faults=faults,
            )
        column, fields = self.column, self._fields(path)
        if fields is not None:
            assert isinstance(self.layout.cutter, ChatCutter), "messages alone have roles"
            names = RoleNames(self.layout.cutter)
            column, of_roles = fields[0], self._scan_roles(fields[1], names, path, bad)
            items[TURN] = turns_table(names.roles, of_roles.num_rows)
            images = replace(images, roles=[names.roles.get(row, []) for row in range(of_roles.num_rows)])
        counted = _CountedRows(self.layout, images)
        scan = self.make(column, counted).scan(path, progress, bad)
        if table is not None:
            if scan.num_rows != len(table.first_item_of_row) - 1:
                raise CatalogError(
                    f"source {self.name!r}: {path} has {scan.num_rows} rows of text and "
                    f"{len(table.first_item_of_row) - 1} of images; run torchmix index again"
                )
            items[IMAGE] = replace(table, offset=counted.offset_of_image.astype(np.int32))
        if isinstance(self.layout.cutter, ChatCutter):
            items[NO_LOSS] = runs_table(counted.runs, scan.num_rows)
        return replace(scan, items=items)

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return self._inner().properties(path, columns)

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        return self._inner().decode(runs)

    def _images(self, path: str | Path) -> tuple[ItemTable | None, dict[int, str]]:
        """The images of a file with their tokens and sizes, still without offsets, and what is wrong with bad ones."""
        if self.rule is None:
            return None, {}
        if self.tables is None:
            raise SourceUnreadable(
                f"source {self.name!r} has images, which an index of shards does not find; run torchmix index"
            )
        table, faults = self.tables(str(path))
        sizes = self.rule.sizes(np.maximum(table.sizes["width"], 1), np.maximum(table.sizes["height"], 1))
        is_bad = np.asarray(table.sizes["width"]) == 0
        columns = {
            "grid_height": sizes.grid_height,
            "grid_width": sizes.grid_width,
            "patches": sizes.patches,
            "segments": sizes.segments,
        }
        of_images = {name: np.where(is_bad, 0, column).astype(np.int32) for name, column in columns.items()}
        of_images |= {name: np.asarray(table.sizes[name]) for name in ("bytes", "height", "width")}
        found = ItemTable(
            first_item_of_row=table.first_item_of_row,
            offset=np.zeros(len(is_bad), np.int32),
            tokens=np.where(is_bad, 0, sizes.tokens).astype(np.int32),
            sizes=dict(sorted(of_images.items())),
        )
        return found, {image: faults.get(image, "its image is bad") for image in np.flatnonzero(is_bad).tolist()}

    def _fields(self, path: str | Path) -> tuple[str, str] | None:
        """The columns of contents and roles, where messages are structs of the file."""
        is_chat = isinstance(self.layout.cutter, ChatCutter)
        return fields_of_messages(self._inner(), self.column, path) if is_chat else None

    def _scan_roles(self, column: str, names: RoleNames, path: str | Path, bad: BadRows | None) -> FileScan:
        """A row whose roles are bad has none, so that its contents are too many."""
        return self.make(column, names).scan(path, None, None if bad is None else BadRows())

    def _inner(self) -> FormatSource:
        return self.make(self.column, self.layout.parts)


class LaidOutEncoder(msgspec.Struct, frozen=True, eq=False):
    """Rows of a source -> ids, with places for its images; implements `RowEncoder`."""

    layout: DocumentLayout
    items: Mapping[str, ItemTable]

    @property
    def takes(self) -> Literal["text", "tokens"]:
        """See `RowEncoder`."""
        return "text"

    @property
    def is_mapped(self) -> bool:
        """See `RowEncoder`; the number of a row leads to its images and turns."""
        return True

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """See `RowEncoder`."""
        images = ImagesOfRows(first_item_of_row=None, tokens=np.zeros(0, np.int64), faults={})
        if IMAGE in self.items:
            table = self.items[IMAGE]
            first = np.asarray(table.first_item_of_row[asked.row], np.int64)
            counts = np.asarray(table.first_item_of_row[asked.row + 1], np.int64) - first
            stops = np.cumsum(counts)
            image = np.arange(stops[-1] if len(stops) else 0) + np.repeat(first - (stops - counts), counts)
            images = ImagesOfRows(
                first_item_of_row=np.concatenate([np.zeros(1, np.int64), stops]),
                tokens=np.asarray(table.tokens[image], np.int64),
                faults={},
            )
        if TURN in self.items:
            images = replace(images, roles=roles_of_rows(self.items[TURN], asked.row))
        values, offsets = self.layout.encode(asked.rows, images, 0, asked.first_row)
        return EncodedRows(values=values, offsets=offsets)


class _CountedRows:
    """Counts the tokens of a file's rows, and notes where images begin and loss ends; implements `Tokenizer`."""

    def __init__(self, layout: DocumentLayout, images: ImagesOfRows) -> None:
        self._layout = layout
        self._images = images
        self.transform_id = layout.transform_id
        self.vocab_size = layout.vocab_size
        self.vocabulary = layout.parts.vocabulary
        self.offset_of_image = np.zeros(len(images.tokens), np.int64)
        self.runs: dict[int, Runs] = {}
        """By row, where tokens have no loss."""

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, Int64Array]:
        """See `Tokenizer`."""
        return self._layout.encode(texts, self._images, first_row, first_row)

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `Tokenizer`; `first_row` is the row of the file."""
        laid = self._layout.count(texts, self._images, first_row, first_row)
        if len(texts):
            _, first, _ = self._images.take(first_row, len(texts))
            self.offset_of_image[first : first + len(laid.offset_of_image)] = laid.offset_of_image
            self._note_runs(laid.row_of_run, laid.offset_of_run, laid.tokens_of_run, first_row, len(texts))
        return laid.tokens

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._layout.parts.decode(ids)

    def _note_runs(self, rows: Int64Array, offset: Int64Array, tokens: Int64Array, first_row: int, count: int) -> None:
        borders = np.searchsorted(rows, np.arange(count + 1)).tolist()
        for row in range(count):
            start, stop = borders[row], borders[row + 1]
            self.runs[first_row + row] = offset[start:stop], tokens[start:stop]


def with_items(source: FormatSource, items: Mapping[str, Any]) -> FormatSource:
    """A source that is to be read, with the items that the catalog has of it."""
    return replace(source, items=items) if isinstance(source, LaidOutTexts) else source
