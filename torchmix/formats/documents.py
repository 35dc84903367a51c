"""Rows that become documents by a template, a list of texts and items, or a mask of loss, as a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.manifest import BadRows, ListBytes, most_lists
from torchmix.catalog.settings import name_of_items
from torchmix.catalog.sizes import Column, TokenRuns
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogError, RecipeError, SourceUnreadable, located, where_of
from torchmix.formats.column import see_lists
from torchmix.formats.items import BYTES_OF_ITEM
from torchmix.formats.source import Documents, FileScan, FormatSource, PageRun
from torchmix.modalities.modality import Modality
from torchmix.storage.random_access import RandomAccessFile
from torchmix.storage.stores import place_of
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.documents.layout import (
    TRANSFORM_ID,
    DocumentLayout,
    ItemsOfKind,
    ItemsOfRows,
    LaidOut,
    LossFlags,
)
from torchmix.transform.documents.row_parts import json_of_rows, number_of_role, parsed
from torchmix.transform.fim import FimOfIds
from torchmix.transform.maps import OTHER_EPOCH, OTHER_SEED, TRIED_ROWS, MapEncoder, told_of_trial
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


# --- Ids of files, and more that is known of them or done with them, as a source.


class _OfIds(msgspec.Struct, frozen=True, kw_only=True):
    """What a source of ids says of itself for a source around it."""

    name: str
    ids: FormatSource

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return self.ids.format

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `FormatSource.fingerprint`."""
        return self.ids.fingerprint(file, path)

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return self.ids.properties(path, columns)

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`; the lengths of a run are those in the file."""
        return self.ids.decode(runs)


# --- Ids with a column beside them that says which of them have loss, as a source.
#
# A row has as many flags as ids; another number is a fault of the row. Cost: the second column is read once, by the
# index.


class LossMasked(_OfIds, frozen=True, kw_only=True):
    """Implements `source.FormatSource`."""

    column: str
    """The column of flags."""
    make_flags: Callable[[LossFlags], FormatSource]
    """Takes flags -> the format's own source of their column."""

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


# --- Ids of files, some of which are cut in three, as a source.
#
# The catalog has how many ids a document becomes, and beside that how many it has in its file. Cost: the index reads
# the ids, also of formats whose lengths lie apart.


class CutIds(_OfIds, frozen=True, kw_only=True):
    """Implements `source.FormatSource`; lengths are measured once pages are known."""

    encoder: FimOfIds

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        return f"{self.ids.transform_id}+{self.encoder.transform_id}"

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return None

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`."""
        return self.encoder

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `FormatSource.check`."""
        self.ids.check(path, bad)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `FormatSource.scan`; the lengths are those in the file."""
        return self.ids.scan(path, progress, bad)


# --- A function of the user's before rows with messages, lists or items become documents.
#
# It takes and gives a row as a file could hold it: a text with its markers, or JSON of a list. Where an item begins and
# which tokens have loss is planned by the index, so it follows from the row alone, as its length does; reading
# compares. Cost: that of the function, and JSON of messages where roles are a column of their own.


class MappedRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The function of one source."""

    encoder: MapEncoder
    roles: Sequence[str]
    """In the order of their numbers."""

    def texts(self, asked: RowsToEncode, roles: list[list[int]] | None) -> tuple[pa.Array, dict[str, pa.Array]]:
        """What rows become, as `MapEncoder.texts`; `roles` [n] of the turns of each, where rows hold contents alone."""
        if roles is None:
            return self.encoder.texts(asked)
        texts = pa.array(list(self._messages(asked, roles)), pa.large_string())
        return self.encoder.texts(replace(asked, rows=texts))

    def _messages(self, asked: RowsToEncode, roles: list[list[int]]) -> Iterator[str]:
        """JSON of the messages of each row."""
        for number, (text, of_row) in enumerate(zip(json_of_rows(asked.rows), roles, strict=True)):
            try:
                assert text is not None, "no row is null"
                held = parsed(text)
                if not isinstance(held, list) or len(held) != len(of_row):
                    raise ValueError(f"it has {len(held)} contents and {len(of_row)} roles")
            except ValueError as error:
                row = asked.first_row + number
                raise SourceUnreadable(f"row {row}: {error}", row=row) from None
            pairs = zip(of_row, held, strict=True)
            yield msgspec.json.encode([{"role": self.roles[role], "content": one} for role, one in pairs]).decode()


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
    map: MapEncoder | None = None
    """What rows go through before."""
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
        mapped = "" if self.map is None else f"{self.map.map_id}+"
        return f"{mapped}{self.layout.transform_id}:{sizes}"

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return self.layout.vocab_size

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`; None while a file is scanned, which counts the tokens itself."""
        if self.items is None:
            return None
        return LaidOutEncoder(self.layout, self.items, self.marks, self._mapped)

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
        counted = _CountedRows(self.layout, of_rows, self._mapped, f"sources.{self.name}.map")
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
        return replace(scan, items=items, marks=marks, lists=most_lists(counted.lists))

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

    @property
    def _mapped(self) -> MappedRows | None:
        return None if self.map is None else MappedRows(encoder=self.map, roles=self.layout.cutter.roles)


class LaidOutEncoder(msgspec.Struct, frozen=True, eq=False):
    """Rows of a source -> ids, with places for its items; implements `RowEncoder`."""

    layout: DocumentLayout
    items: Mapping[str, TokenRuns]
    marks: Mapping[str, TokenRuns]
    map: MappedRows | None = None

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
            first, item = _runs_of_rows(table, asked.row)
            of_kinds.append(_taken(first, table.tokens[item], {}))
        roles = roles_of_rows(self.marks[TURN], asked.row) if TURN in self.marks else None
        items = ItemsOfRows(kinds=tuple(of_kinds), roles=roles)
        if self.map is None:
            values, offsets = self.layout.encode(asked.rows, items, 0, asked.first_row)
            return EncodedRows(values=values, offsets=offsets)
        texts, others = self.map.texts(asked, roles)
        has_losses = NO_LOSS in self.marks and self.map.encoder.map.is_random  # else they follow from the same text
        values, offsets, laid = self.layout.encode_and_lay(
            texts, replace(items, roles=None), 0, asked.first_row, needs_loss=has_losses
        )
        self._check_places(self.map, asked, laid, has_losses=has_losses)
        return EncodedRows(values=values, offsets=offsets, others=others)

    def _check_places(self, mapped: MappedRows, asked: RowsToEncode, laid: LaidOut, *, has_losses: bool) -> None:
        """Raise where items begin, or tokens have loss, elsewhere than the index found."""
        for ids, found in zip(self.layout.items, laid.offset_of_item, strict=True):
            table = self.items[ids.kind]
            if not np.array_equal(found, table.offset[_runs_of_rows(table, asked.row)[1]]):
                raise mapped.encoder.fault(asked, f"puts {ids.kind}s to other places than when it was indexed")
        if has_losses:
            table = self.marks[NO_LOSS]
            first, run = _runs_of_rows(table, asked.row)
            of_row = np.repeat(np.arange(len(asked.row)), np.diff(first))
            pairs = (laid.row_of_run, of_row), (laid.offset_of_run, table.offset[run])
            if not all(np.array_equal(*pair) for pair in (*pairs, (laid.tokens_of_run, table.tokens[run]))):
                raise mapped.encoder.fault(asked, "gives other tokens loss than when it was indexed")


def _runs_of_rows(table: TokenRuns, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The runs of some rows, end to end: where those of each row begin among them, [n + 1], and their numbers."""
    first = np.asarray(table.first_run_of_row[rows], np.int64)
    counts = np.asarray(table.first_run_of_row[rows + 1], np.int64) - first
    stops = np.cumsum(counts)
    number = np.arange(stops[-1] if len(stops) else 0) + np.repeat(first - (stops - counts), counts)
    return np.concatenate([np.zeros(1, np.int64), stops]), number


def _taken(first_item_of_row: Column, tokens: Column, faults: Mapping[int, str]) -> ItemsOfKind:
    return ItemsOfKind(
        first_item_of_row=np.asarray(first_item_of_row, np.int64), tokens=np.asarray(tokens, np.int64), faults=faults
    )


class _CountedRows:
    """Counts the tokens of a file's rows, and notes where items begin and loss ends; implements `Tokenizer`."""

    def __init__(self, layout: DocumentLayout, items: ItemsOfRows, mapped: MappedRows | None, where: str) -> None:
        self._layout = layout
        self._items = items if mapped is None else replace(items, roles=None)
        self._roles = items.roles
        self._map, self._where, self._is_tried = mapped, where, False
        self.transform_id = layout.transform_id
        self.vocab_size = layout.vocab_size
        self.vocabulary = layout.parts.vocabulary
        self.offset_of_item = [np.zeros(len(of_kind.tokens), np.int64) for of_kind in items.kinds]
        """By kind."""
        self.runs: dict[int, Runs] = {}
        """By row, where tokens have no loss."""
        self.lists: list[ListBytes | None] = []
        """What a map gives beside texts."""

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, Int64Array]:
        """See `Tokenizer`; nothing is encoded while a file is scanned."""
        raise NotImplementedError

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `Tokenizer`; `first_row` is the row of the file."""
        lists: dict[str, pa.Array] = {}
        is_there = texts.is_valid().to_numpy(zero_copy_only=False)
        if self._map is not None and is_there.any():
            self._try(self._map, texts, first_row)
            texts, lists = self._mapped(self._map, texts, first_row)
        laid = self._layout.count(texts, self._items, first_row, first_row)
        self.lists.append(see_lists(lists, laid.tokens[is_there]))
        if len(texts):
            for whole, of_kind, offset in zip(self.offset_of_item, self._items.kinds, laid.offset_of_item, strict=True):
                first = int(of_kind.first_item_of_row[first_row])
                whole[first : first + len(offset)] = offset
            self._note_runs(laid.row_of_run, laid.offset_of_run, laid.tokens_of_run, first_row, len(texts))
        return laid.tokens

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._layout.parts.decode(ids)

    def _mapped(
        self, mapped: MappedRows, texts: pa.Array, first_row: int, *, epoch: int = 0, seed: int = 0
    ) -> tuple[pa.Array, dict[str, pa.Array]]:
        """What rows become, null where they are null, and the lists of those that are not."""
        is_there = texts.is_valid().to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(is_there)
        asked = RowsToEncode(
            rows=texts.drop_null().cast(pa.large_string()),
            row=rows + first_row,
            epoch=epoch,
            seed=np.full(len(rows), seed, np.uint64),
            first_row=first_row + int(rows[0]),
        )
        roles = None if self._roles is None else [self._roles[row] for row in asked.row.tolist()]
        try:
            made, lists = mapped.texts(asked, roles)
        except SourceUnreadable:
            half = int(rows[len(rows) // 2]) if len(rows) > 1 else 0
            for start, stop in ((0, half), (half, len(texts))) if half else ():  # so that the error names the row
                self._mapped(mapped, texts.slice(start, stop - start), first_row + start, epoch=epoch, seed=seed)
            raise
        if len(rows) < len(texts):
            made = made.take(pa.array(np.cumsum(is_there) - 1, mask=~is_there))
        return made, lists

    def _try(self, mapped: MappedRows, texts: pa.Array, first_row: int) -> None:
        """Raise RecipeError, once a file, where a map gives other lengths or places in another epoch."""
        if self._is_tried:
            return
        self._is_tried, tried = True, mapped.encoder.map
        few = texts.slice(0, int(np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))[0]) + TRIED_ROWS)
        try:
            one, _ = self._mapped(mapped, few, first_row)
            other, _ = self._mapped(mapped, few, first_row, epoch=OTHER_EPOCH, seed=OTHER_SEED)
            laid, again = (self._layout.count(made, self._items, first_row, first_row) for made in (one, other))
        except SourceUnreadable:
            return  # what counts all rows finds which one
        rows = first_row + np.arange(len(few))
        told = told_of_trial(tried, rows, laid.tokens, again.tokens, is_same=one.equals(other))
        places = [
            (*lies.offset_of_item, lies.row_of_run, lies.offset_of_run, lies.tokens_of_run) for lies in (laid, again)
        ]
        if told is None and not all(map(np.array_equal, *places)):
            told = (
                f"the map {tried.words} moves items, or tokens without loss, with another epoch and seed; their places "
                "must follow from the row alone, since steps are planned by them"
            )
        if told is not None:
            raise RecipeError(told, self._where)

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
