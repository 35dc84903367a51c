"""Rows that become documents by a template, a list of texts and items, or a mask of loss, as a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.manifest import BadRows
from torchmix.catalog.settings import name_of_items
from torchmix.catalog.sizes import Column, TokenRuns
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogError, SourceUnreadable, located, where_of
from torchmix.formats.items import BYTES_OF_ITEM
from torchmix.formats.source import Documents, FileScan, FormatSource, PageRun
from torchmix.modalities.modality import Modality
from torchmix.storage.random_access import RandomAccessFile
from torchmix.storage.stores import place_of
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.documents.layout import TRANSFORM_ID, DocumentLayout, ItemsOfKind, ItemsOfRows, LossFlags
from torchmix.transform.documents.row_parts import json_of_rows, number_of_role, parsed
from torchmix.transform.tokenizer import EncodedRows, Ids, RowEncoder, RowsToEncode, Tokenizer

# --- Marks that the catalog keeps of documents: runs of tokens without loss, and turns of a chat.
#
# Runs are in the order of their tokens; no two touch. Cost: 8 bytes a run and 9 a turn, and 8 a row.

NO_LOSS = "no_loss"
"""A run of tokens that no model is trained to predict."""
TURN = "turn"
"""A message of a chat; its column `role` numbers the role."""
ROLE = "role"

Runs = tuple[NDArray[np.integer], NDArray[np.integer]]
"""Where the runs of a row begin in its document, and their tokens."""


def runs_table(runs: Mapping[int, Runs], num_rows: int) -> TokenRuns:
    """Runs of tokens without loss, by row."""
    rows = sorted(row for row, (offsets, _) in runs.items() if len(offsets))
    none = np.zeros(0, np.int32)
    return TokenRuns(
        first_run_of_row=_first_runs(rows, [len(runs[row][0]) for row in rows], num_rows),
        offset=np.concatenate([none, *(runs[row][0] for row in rows)]).astype(np.int32),
        tokens=np.concatenate([none, *(runs[row][1] for row in rows)]).astype(np.int32),
    )


def turns_table(roles: Mapping[int, Sequence[int]], num_rows: int) -> TokenRuns:
    """Roles of the turns of each row."""
    rows = sorted(roles)
    of_rows = [role for row in rows for role in roles[row]]
    return TokenRuns(
        first_run_of_row=_first_runs(rows, [len(roles[row]) for row in rows], num_rows),
        offset=np.zeros(len(of_rows), np.int32),
        tokens=np.zeros(len(of_rows), np.int32),
        sizes={ROLE: np.array(of_rows, np.uint8)},
    )


def roles_of_rows(table: TokenRuns, rows: Int64Array) -> list[list[int]]:
    """Roles of the turns of some rows, as `turns_table` had them."""
    first = np.asarray(table.first_run_of_row)
    role = table.sizes[ROLE]
    return [role[first[row] : first[row + 1]].tolist() for row in rows.tolist()]


def _first_runs(rows: list[int], counts: list[int], num_rows: int) -> Int64Array:
    of_row = np.zeros(num_rows, np.int64)
    of_row[rows] = counts
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(of_row)])


# --- The roles of a chat whose messages are structs of a file, so that roles and contents are columns of their own.
#
# A role that the template lacks is a fault of its row.

FIELDS = (("content", "role"), ("value", "from"))
"""The fields of a message: what it says, and who says it."""


class RoleNames:
    """Takes the roles of one file; stands where a tokenizer stands."""

    transform_id = "roles-1"
    vocab_size = 1
    vocabulary = "roles"

    def __init__(self, known: Sequence[str]) -> None:
        """Nothing is seen yet; `known` are the roles in the order of their numbers."""
        self._known = known
        self.roles: dict[int, list[int]] = {}
        """By row."""

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; no row has tokens."""
        for row, text in enumerate(json_of_rows(texts), first_row):
            if text is None:
                continue
            try:
                self.roles[row] = [number_of_role(self._known, name) for name in parsed(text)]
            except ValueError as error:
                raise SourceUnreadable(f"row {row}: {error}", row=row) from None
        return np.zeros(len(texts), np.int64)

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; no row has tokens."""
        return np.zeros(0, np.uint8), np.zeros(len(texts) + 1, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return f"{len(ids)} roles"


LOST = ("tool_calls", "function_call", "reasoning_content")
"""Fields of a message that change its document, and that columns of contents and roles have no room for."""


def fields_of_messages(source: FormatSource, column: str, path: str | Path) -> tuple[str, str] | None:
    """The columns of contents and roles, where messages are structs of the file; None: they are JSON.

    Args:
        source: The source of the column of messages.
        column: Its name.
        path: The file.

    Raises:
        SourceUnreadable: There is no such column, or it holds something else, or messages with fields that would be
            lost.
    """
    try:
        source.check(path, BadRows())
    except SourceUnreadable as error:
        lost = [f"{column}.{name}" for name in LOST if f"{column}.{name}" in str(error)]
        if lost and "is a struct" in str(error):
            raise SourceUnreadable(
                f"{path}: messages have the column {lost[0]}, and only role and content of structs are read; write the "
                f"messages as text of JSON, or leave {lost[0]} out where it holds nothing"
            ) from None
        for content, role in FIELDS:
            if "is a struct" in str(error) and all(f"{column}.{name}" in str(error) for name in (content, role)):
                inner = f"{column}.{content}.text"  # a list of parts, each with its type
                return (inner if inner in str(error) else f"{column}.{content}"), f"{column}.{role}"
        raise
    return None


# --- Ids with a column beside them that says which of them have loss, as a source.
#
# A row has as many flags as ids; another number is a fault of the row. Cost: the second column is read once, by the
# index.


class LossMasked(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `source.FormatSource`."""

    name: str
    ids: FormatSource
    column: str
    """The column of flags."""
    make_flags: Callable[[LossFlags], FormatSource]
    """Takes flags -> the format's own source of their column."""

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return self.ids.format

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        return f"{self.ids.transform_id}+{TRANSFORM_ID}:{self.column}"

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return self.ids.vocab_size

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`."""
        return None

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `FormatSource.fingerprint`."""
        return self.ids.fingerprint(file, path)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `FormatSource.check`."""
        self.ids.check(path, bad)
        self.make_flags(LossFlags()).check(path, bad)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `FormatSource.scan`."""
        flags = LossFlags()
        of_flags = self.make_flags(flags).scan(path, None, None if bad is None else BadRows())
        scan = self.ids.scan(path, progress, bad)
        with located(where_of(self.name, path)):
            tokens = self._good_tokens(of_flags, scan, bad)
        runs = {row: flags.runs(row) for row in np.flatnonzero(tokens).tolist()}
        return replace(scan, tokens=tokens, marks={NO_LOSS: runs_table(runs, scan.num_rows)})

    def _good_tokens(self, of_flags: FileScan, scan: FileScan, bad: BadRows | None) -> Int32Array:
        """Tokens of each row; none of one with another number of flags."""
        if of_flags.num_rows != scan.num_rows:
            raise SourceUnreadable(
                f"{self.column!r} has {of_flags.num_rows} rows, and there are {scan.num_rows} of ids"
            )
        is_bad = np.zeros(scan.num_rows, np.bool_)
        if bad is not None:
            is_bad[np.asarray(bad.rows, np.int64)] = True
        for row in np.flatnonzero((of_flags.tokens != scan.tokens) & ~is_bad).tolist():
            fault = f"it has {scan.tokens[row]} tokens and {of_flags.tokens[row]} values in {self.column!r}"
            if bad is None:
                raise SourceUnreadable(f"row {row}: {fault}; there must be as many", row=row)
            bad.add(row, fault)
            is_bad[row] = True
        return np.where(is_bad, 0, scan.tokens).astype(np.int32)

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return self.ids.properties(path, columns)

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        return self.ids.decode(runs)


# --- Rows that a template or a list of texts and items makes documents of, as a source.
#
# What encodes a row later has the tokens that the scan counted, since both take the tokens of each item from its size
# alone.

TableOfFile = Callable[[str], tuple[TokenRuns, Mapping[int, str]]]
"""Path of a file -> the items in it, and what is wrong with the bad ones, by number."""
MakeColumn = Callable[[str, Tokenizer], FormatSource]
"""Column and tokenizer -> the format's own source."""


class LaidOutTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `source.FormatSource`."""

    name: str
    column: str
    layout: DocumentLayout
    modalities: Mapping[str, Modality]
    """The kinds of items in the texts, sorted."""
    make: MakeColumn
    tables: Mapping[str, TableOfFile] | None = None
    """By kind; needed for a scan of a source with items."""
    items: Mapping[str, TokenRuns] | None = None
    """Items of the source as they were indexed; needed to read."""
    marks: Mapping[str, TokenRuns] = msgspec.field(default_factory=dict)
    """Marks of the source, in the same way."""

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return self._inner().format

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        sizes = ";".join(modality.sizes_id for modality in self.modalities.values())
        return f"{self.layout.transform_id}:{sizes}"

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return self.layout.vocab_size

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`; None while a file is scanned, which counts the tokens itself."""
        return None if self.items is None else LaidOutEncoder(self.layout, self.items, self.marks)

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `FormatSource.fingerprint`."""
        return self._inner().fingerprint(file, path)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `FormatSource.check`; items are not looked at."""
        fields = self._fields(path)
        for column in (self.column,) if fields is None else fields:
            self.make(column, BYTES).check(path, bad)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `FormatSource.scan`.

        Raises:
            CatalogError: The items of the file are not indexed, or are of other rows.
        """
        marks: dict[str, TokenRuns] = {}
        tables, of_kinds = self._items(path)
        of_rows = ItemsOfRows(kinds=of_kinds)
        column, fields = self.column, self._fields(path)
        if fields is not None:
            names = RoleNames(self.layout.cutter.roles)
            column, of_roles = fields[0], self._scan_roles(fields[1], names, path, bad)
            marks[TURN] = turns_table(names.roles, of_roles.num_rows)
            of_rows = replace(of_rows, roles=[names.roles.get(row, []) for row in range(of_roles.num_rows)])
        counted = _CountedRows(self.layout, of_rows)
        scan = self.make(column, counted).scan(path, progress, bad)
        items: dict[str, TokenRuns] = {}
        for (kind, table), offset in zip(tables.items(), counted.offset_of_item, strict=True):
            if scan.num_rows != len(table.first_run_of_row) - 1:
                raise CatalogError(
                    f"source {self.name!r}: {path} has {scan.num_rows} rows of text and "
                    f"{len(table.first_run_of_row) - 1} of {kind}s; run torchmix index again"
                )
            items[kind] = replace(table, offset=offset.astype(np.int32))
        if self.layout.cutter.has_losses:
            marks[NO_LOSS] = runs_table(counted.runs, scan.num_rows)
        return replace(scan, items=items, marks=marks)

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return self._inner().properties(path, columns)

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        return self._inner().decode(runs)

    def _items(self, path: str | Path) -> tuple[dict[str, TokenRuns], tuple[ItemsOfKind, ...]]:
        """The items of a file by kind, with their tokens and sizes, still without offsets; and what they take."""
        found: dict[str, TokenRuns] = {}
        of_kinds: list[ItemsOfKind] = []
        for kind, modality in self.modalities.items():
            if self.tables is None:
                raise SourceUnreadable(
                    f"source {self.name!r} has {kind}s, which an index of shards does not find; run torchmix index"
                )
            table, faults = self.tables[kind](str(path))
            sizes = modality.sizes({name: np.maximum(table.sizes[name], 1) for name in modality.measured})
            is_bad = np.asarray(table.sizes[modality.measured[0]]) == 0
            columns = {name: np.where(is_bad, 0, column).astype(np.int32) for name, column in sizes.columns.items()}
            columns |= {name: np.asarray(table.sizes[name]) for name in (BYTES_OF_ITEM, *modality.measured)}
            found[kind] = TokenRuns(
                first_run_of_row=table.first_run_of_row,
                offset=np.zeros(len(is_bad), np.int32),
                tokens=np.where(is_bad, 0, sizes.tokens).astype(np.int32),
                sizes=dict(sorted(columns.items())),
            )
            reasons = {item: faults.get(item, f"its {kind} is bad") for item in np.flatnonzero(is_bad).tolist()}
            of_kinds.append(_taken(found[kind].first_run_of_row, found[kind].tokens, reasons))
        return found, tuple(of_kinds)

    def _fields(self, path: str | Path) -> tuple[str, str] | None:
        """The columns of contents and roles, where messages are structs of the file."""
        is_chat = bool(self.layout.cutter.roles)
        return fields_of_messages(self._inner(), self.column, path) if is_chat else None

    def _scan_roles(self, column: str, names: RoleNames, path: str | Path, bad: BadRows | None) -> FileScan:
        """A row whose roles are bad has none, so that its contents are too many."""
        return self.make(column, names).scan(path, None, None if bad is None else BadRows())

    def _inner(self) -> FormatSource:
        return self.make(self.column, self.layout.parts)


class LaidOutEncoder(msgspec.Struct, frozen=True, eq=False):
    """Rows of a source -> ids, with places for its items; implements `RowEncoder`."""

    layout: DocumentLayout
    items: Mapping[str, TokenRuns]
    marks: Mapping[str, TokenRuns]

    @property
    def takes(self) -> Literal["text", "tokens"]:
        """See `RowEncoder`."""
        return "text"

    @property
    def is_mapped(self) -> bool:
        """See `RowEncoder`; the number of a row leads to its items and turns."""
        return True

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """See `RowEncoder`."""
        of_kinds: list[ItemsOfKind] = []
        for ids in self.layout.items:
            table = self.items[ids.kind]
            first = np.asarray(table.first_run_of_row[asked.row], np.int64)
            counts = np.asarray(table.first_run_of_row[asked.row + 1], np.int64) - first
            stops = np.cumsum(counts)
            item = np.arange(stops[-1] if len(stops) else 0) + np.repeat(first - (stops - counts), counts)
            of_kinds.append(_taken(np.concatenate([np.zeros(1, np.int64), stops]), table.tokens[item], {}))
        roles = roles_of_rows(self.marks[TURN], asked.row) if TURN in self.marks else None
        items = ItemsOfRows(kinds=tuple(of_kinds), roles=roles)
        values, offsets = self.layout.encode(asked.rows, items, 0, asked.first_row)
        return EncodedRows(values=values, offsets=offsets)


def _taken(first_item_of_row: Column, tokens: Column, faults: Mapping[int, str]) -> ItemsOfKind:
    return ItemsOfKind(
        first_item_of_row=np.asarray(first_item_of_row, np.int64), tokens=np.asarray(tokens, np.int64), faults=faults
    )


class _CountedRows:
    """Counts the tokens of a file's rows, and notes where items begin and loss ends; implements `Tokenizer`."""

    def __init__(self, layout: DocumentLayout, items: ItemsOfRows) -> None:
        self._layout = layout
        self._items = items
        self.transform_id = layout.transform_id
        self.vocab_size = layout.vocab_size
        self.vocabulary = layout.parts.vocabulary
        self.offset_of_item = [np.zeros(len(of_kind.tokens), np.int64) for of_kind in items.kinds]
        """By kind."""
        self.runs: dict[int, Runs] = {}
        """By row, where tokens have no loss."""

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, Int64Array]:
        """See `Tokenizer`."""
        return self._layout.encode(texts, self._items, first_row, first_row)

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `Tokenizer`; `first_row` is the row of the file."""
        laid = self._layout.count(texts, self._items, first_row, first_row)
        if len(texts):
            for whole, of_kind, offset in zip(self.offset_of_item, self._items.kinds, laid.offset_of_item, strict=True):
                first = int(of_kind.first_item_of_row[first_row])
                whole[first : first + len(offset)] = offset
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


def with_items(source: FormatSource, items: Mapping[str, TokenRuns], marks: Mapping[str, TokenRuns]) -> FormatSource:
    """A source that is to be read, with the items and marks that the catalog has of it."""
    return replace(source, items=items, marks=marks) if isinstance(source, LaidOutTexts) else source


# --- The items of each file, from the catalog of their column.
#
# Files are found by their paths, since two indexes may count files in different orders.


class IndexedItems:
    """Items of the files of several sources."""

    def __init__(self, catalog: Catalog, base: Path) -> None:
        """`catalog` holds the columns of items; paths of files are relative to `base`."""
        self._catalog = catalog
        self._base = base

    def of_source(self, name: str, kind: str) -> TableOfFile:
        """The items of a kind in the files of one source."""
        source = self._catalog.sources[name_of_items(name, kind)]
        files = {place_of(self._base, file.path): file for file in source.files}

        def find(path: str) -> tuple[TokenRuns, Mapping[int, str]]:
            if path not in files:
                raise CatalogError(f"source {name!r}: the {kind}s of {path} are not indexed; run torchmix index")
            file = files[path]
            table = source.sizes.items[kind].of_rows(file.first_row, file.first_row + file.num_rows)
            first = table.first_run_of_row
            reasons = {
                item: bad.reason
                for bad in file.bad_rows
                for item in range(int(first[bad.row]), int(first[bad.row + 1]))
            }
            return table, reasons

        return find
