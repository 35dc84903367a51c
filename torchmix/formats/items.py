"""The items of a source, such as images: their column, their headers, their places in lists of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from torchmix.catalog.manifest import BadRows
from torchmix.catalog.sizes import Column, TokenRuns
from torchmix.errors import CatalogError, ItemUnreadable, SourceUnreadable
from torchmix.formats.source import Documents, FileScan, FormatSource, PageRun
from torchmix.modalities.modality import Measures, Modality
from torchmix.recipe.items import key_of_items
from torchmix.recipe.structs import ItemWords
from torchmix.storage.random_access import RandomAccessFile
from torchmix.storage.store_file import opened
from torchmix.storage.stores import place_of
from torchmix.transform.bytes_tokenizer import RawBytes, See
from torchmix.transform.tokenizer import RowEncoder

# --- The items of one file, found while the column that holds them is scanned.
#
# A null and an empty value are no item; a bad one measures 0 and has a reason.

BYTES_OF_ITEM = "bytes"
"""The column of the catalog that has the size of an item in bytes."""


class HeaderScan:
    """Takes the values of one file."""

    def __init__(self, *, folder: Path | str | None, modality: Modality, masks_bad: bool) -> None:
        """Nothing is seen yet.

        Args:
            folder: The values are paths relative to it; None: they are items.
            modality: Measures them, and refuses some.
            masks_bad: Whether a bad item is noted; else it is an error.
        """
        self._folder = folder
        self._modality = modality
        self._masks_bad = masks_bad
        self._found: dict[int, list[_FoundItem]] = {}
        """By row: its items."""
        self._bytes: dict[int, int] = {}
        """By row: bytes of its values so far, where there are any."""
        self._nulls: dict[int, dict[int, int]] = {}
        """By row: the numbers of its values that are null or empty, and how many items come before each."""
        self._num_values: dict[int, int] = {}
        """By row."""
        self._num_others: dict[int, int] = {}
        """By row: values of the other field."""
        self.faults: dict[int, str] = {}

    def see(self, row: int, values: list[bytes | None], goes_on: bool) -> None:
        """Look at the values of a row.

        Args:
            row: The row of the file.
            values: The values of the row; a null and an empty value are no item.
            goes_on: They follow those that the row had before.

        Raises:
            SourceUnreadable: One is no item, and bad ones are errors.
            MemoryError: One needs more memory than there is.
        """
        if not goes_on:
            for held in (self._found, self._bytes, self._num_values, self._nulls, self.faults):
                held.pop(row, None)
        first = self._num_values.get(row, 0)
        self._num_values[row] = first + len(values)
        for number, value in enumerate(values, first):
            if not value:
                self._nulls.setdefault(row, {})[number] = len(self._found.get(row, ()))
                continue
            offset = self._bytes.get(row, 0)
            self._bytes[row] = offset + len(value)
            found = self._found.setdefault(row, [])
            try:
                measures, num_bytes = self._measure(value)
                found.append(_FoundItem(measures, offset, len(value), num_bytes))
            except (ItemUnreadable, SourceUnreadable) as error:
                reason = self._reason(len(found), len(values) > 1 or goes_on, value, error)
                if not self._masks_bad:
                    raise SourceUnreadable(f"row {row}: {reason}", row=row) from None
                self.faults.setdefault(row, reason)
                found.append(_FoundItem(self._nothing, offset, len(value), 0))
            except MemoryError as error:  # whatever bad_rows says: with more memory it is an item
                raise MemoryError(f"the {self._modality.kind} of row {row}, {str(error) or 'no more'}") from error

    @property
    def has_nulls(self) -> bool:
        """Whether a value was null or empty."""
        return bool(self._nulls)

    def see_other_field(self, row: int, values: list[bytes | None], goes_on: bool) -> None:
        """Look at the values of a row in the other field of its structs, once all rows of the column were seen.

        Args:
            row: The row of the file.
            values: Paths where the column holds bytes, bytes where it holds paths; one for each value of the column.
            goes_on: They follow those that the row had before.

        Raises:
            SourceUnreadable: An item is in the other field alone, and bad ones are errors.
        """
        first = self._num_others.get(row, 0) if goes_on else 0
        self._num_others[row] = first + len(values)
        nulls = self._nulls.get(row, {})
        for number, value in enumerate(values, first):
            if not value or number not in nulls:
                continue
            kind = self._modality.kind
            which = f"its {kind} {number}" if self._num_values[row] > 1 else f"its {kind}"
            folder = f"{key_of_items(kind)}.folder"
            if self._folder is None:
                path = value.decode("utf-8", "replace")[:200]
                what = f"has no bytes, only the path {path!r}; name the folder of such paths by {folder}, or put "
                reason = f"{which} {what}the {kind}s into the file"
            else:
                what = f"has no path, only bytes; {folder} says that {kind}s are read by their paths"
                reason = f"{which} {what}: remove it, or write the paths"
            if not self._masks_bad:
                raise SourceUnreadable(f"row {row}: {reason}", row=row)
            self.faults.setdefault(row, reason)
            # A bad item, so that the markers of its row are as many; it has no bytes to read.
            found, place = self._found.setdefault(row, []), nulls[number]
            offset = found[place].offset if place < len(found) else self._bytes.get(row, 0)
            found.insert(place, _FoundItem(self._nothing, offset, 0, 0))
            self._nulls[row] = nulls = {k: before + (k > number) for k, before in nulls.items()}

    def _reason(self, number: int, is_one_of_several: bool, value: bytes, error: CatalogError) -> str:
        which = f"its {self._modality.kind} {number}" if is_one_of_several else f"its {self._modality.kind}"
        return (
            f"{which} {value.decode('utf-8', 'replace')[:200]!r}: {error.message}"
            if self._folder is not None
            else f"{which}: {error.message}"
        )

    @property
    def _nothing(self) -> Measures:
        return (0,) * len(self._modality.measured)

    def _measure(self, value: bytes) -> tuple[Measures, int]:
        if self._folder is None:
            view = memoryview(value)
            return self._modality.measure(lambda at, count: bytes(view[at : at + count]), len(value)), len(value)
        path = item_path(self._folder, value)
        with opened(path, "") as file:
            return self._modality.measure(file.read, file.num_bytes), file.num_bytes

    def check_limits(self, table: TokenRuns) -> None:
        """Note the rows that have more items, or more tokens of these, than the options of the source allow.

        Args:
            table: Of all rows, as `table` gives it.

        Raises:
            SourceUnreadable: There is such a row, and bad ones are errors.
        """
        words, kind, first = self._modality.words, self._modality.kind, table.first_run_of_row
        if words.most_items is None and words.most_item_tokens is None:
            return
        measures = {name: table.sizes[name] for name in self._modality.measured}
        is_good = np.all([np.asarray(one) > 0 for one in measures.values()], axis=0)
        tokens = np.zeros(len(is_good), np.int64)
        tokens[is_good] = self._modality.sizes({key: np.asarray(one)[is_good] for key, one in measures.items()}).tokens
        in_front = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens)])[first]
        for counts, most, what in (
            (np.diff(first), words.most_items, f"{kind}s, more than most_items"),
            (np.diff(in_front), words.most_item_tokens, f"tokens of {kind}s, more than most_item_tokens"),
        ):
            for row in np.flatnonzero(counts > most).tolist() if most is not None else ():
                reason = f"it has {counts[row]} {what} {most}"
                if not self._masks_bad:
                    raise SourceUnreadable(f"row {row}: {reason}", row=row)
                self.faults.setdefault(row, reason)

    def table(self, num_rows: int) -> TokenRuns:
        """The items of the file's rows, in the order of their values; an item begins with its value."""
        rows = sorted(row for row, found in self._found.items() if found)
        counts = np.zeros(num_rows, np.int64)
        counts[rows] = [len(self._found[row]) for row in rows]
        found = [each for row in rows for each in self._found[row]]
        measured = self._modality.measured
        measures = np.array([each.measures for each in found], np.int32).reshape(len(found), len(measured))
        sizes: dict[str, Column] = {BYTES_OF_ITEM: np.array([each.item_bytes for each in found], np.int64)}
        sizes |= {name: measures[:, i] for i, name in enumerate(measured)}
        return TokenRuns(
            first_run_of_row=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
            offset=np.array([each.offset for each in found], np.int32),
            tokens=np.array([each.value_bytes for each in found], np.int32),
            sizes=dict(sorted(sizes.items())),
        )


class _FoundItem(NamedTuple):
    """One item; a bad one measures 0."""

    measures: Measures
    offset: int
    """Bytes of the row's values before its own."""
    value_bytes: int
    item_bytes: int


def item_path(folder: Path | str, value: bytes) -> str:
    """Where the item lies that a value names.

    Raises:
        SourceUnreadable: The value is no path.
    """
    try:
        return place_of(Path(folder), value.decode("utf-8"))
    except UnicodeDecodeError:
        raise SourceUnreadable("the path is not UTF-8") from None


# --- The column of items of a source, as a source of its own: a document is the bytes of a row.
#
# Rows are those of the texts. Cost: a scan reads the column and the headers in it.

MakeSource = Callable[[str, RawBytes], FormatSource]
"""Column and transform -> the format's own source."""


class ItemColumn(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `source.FormatSource`; its tokens are bytes."""

    name: str
    words: ItemWords
    folder: str | None
    """What paths in the column are relative to; None: it holds items."""
    modality: Modality
    make: MakeSource

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return self._inner().format

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        return self.modality.column_id

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return None

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`; bytes are what is wanted."""
        return None

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `FormatSource.fingerprint`."""
        return self._inner().fingerprint(file, path)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `FormatSource.check`."""
        self._inner(self._column(path)).check(path, bad)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `FormatSource.scan`."""
        headers = HeaderScan(
            folder=self.folder,
            modality=self.modality,
            masks_bad=bad is not None,
        )
        column = self._column(path)
        scan = self._inner(column, headers.see).scan(path, progress, bad)
        other = self._other_field(column, path)
        if headers.has_nulls and other is not None:
            self._inner(other, headers.see_other_field).scan(path, None, None if bad is None else BadRows())
        table = headers.table(scan.num_rows)
        headers.check_limits(table)
        if bad is not None:
            for row, reason in sorted(headers.faults.items()):
                bad.add(row, reason)
        return replace(scan, items={self.modality.kind: table})

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return self._inner().properties(path, columns)

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        return self._inner().decode(runs)

    def _column(self, path: str | Path) -> str:
        """The column; of a struct of items its field `bytes`, or `path` where the column holds paths."""
        column = self.words.column
        try:
            self._inner().check(path, BadRows())
        except SourceUnreadable as error:
            field = f"{column}.{'bytes' if self.folder is None else 'path'}"
            if "is a struct" not in str(error) or field not in str(error):
                raise
            return field
        return column

    def _other_field(self, column: str, path: str | Path) -> str | None:
        """Where a struct of items has `bytes` and `path`, the one that is not `column`."""
        field, other = ("bytes", "path") if self.folder is None else ("path", "bytes")
        if not column.endswith(f".{field}"):
            return None
        found = f"{column.removesuffix(field)}{other}"
        try:
            self._inner(found).check(path, BadRows())
        except SourceUnreadable:
            return None
        return found

    def _inner(self, column: str | None = None, see: See | None = None) -> FormatSource:
        raw = RawBytes(self.transform_id, see)
        return self.make(column or self.words.column, raw)


# --- Items whose places in a list of texts stand beside them, as MMC4 has them.
#
# An item stands before the text whose number is its place, and items of one place keep their order. Cost: parsing
# the row's JSON into Python objects.

PLACED = "\0"
"""Between the path of values and that of places, in what stands for a column inside of this room."""
_Value = TypeVar("_Value")


def placed_column(column: str, place: str | None) -> str:
    """A column whose items have places; the column itself where `place` is None."""
    return column if place is None else f"{column}{PLACED}{place}"


class PlacedValues(msgspec.Struct, frozen=True, kw_only=True):
    """What such a column means."""

    values: tuple[str, ...]
    """Keys that lead to the texts, or to the items; lists on the way are walked through."""
    places: tuple[str, ...]

    @classmethod
    def of(cls, column: str) -> PlacedValues | None:
        """From the column; None where it has no places."""
        values, mark, places = column.partition(PLACED)
        return cls(values=tuple(values.split(".")), places=tuple(places.split("."))) if mark else None

    def texts(self, row: Any) -> list[str | None]:
        """The texts of a row, and None for each item.

        Raises:
            ValueError: The row holds something else.
        """
        texts = _walk(row, self.values)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{'.'.join(self.values)} is no list of texts")
        before: list[int] = [0] * len(texts)
        for place in self._places(row):
            if place >= len(texts):
                raise ValueError(f"an item has the place {place}, and there are {len(texts)} texts")
            before[place] += 1
        return [part for text, count in zip(texts, before, strict=True) for part in (*[None] * count, text)]

    def items(self, row: Any) -> list[str | None]:
        """The items of a row, in the order of the document; errors as `texts`."""
        items = _walk(row, self.values)
        if not isinstance(items, list) or not all(item is None or isinstance(item, str) for item in items):
            raise ValueError(f"{'.'.join(self.values)} is no list of texts")
        return self.in_order(row, items)

    def in_order(self, row: Any, items: Sequence[_Value]) -> list[_Value]:
        """Items of a row that lie elsewhere, in the order of the document; errors as `texts`."""
        places = self._places(row)
        if len(places) != len(items):
            raise ValueError(f"it has {len(items)} items and {len(places)} places")
        return [items[i] for i in sorted(range(len(items)), key=places.__getitem__)]

    def _places(self, row: Any) -> list[int]:
        places = _walk(row, self.places)
        if not isinstance(places, list) or not all(type(place) is int and place >= 0 for place in places):
            raise ValueError(f"{'.'.join(self.places)} is no list of numbers of texts")
        return places


def _walk(held: Any, path: Sequence[str]) -> Any:
    for depth, key in enumerate(path):
        if isinstance(held, list):
            return [_walk(one, path[depth:]) for one in held]
        if not isinstance(held, dict) or key not in held:
            raise ValueError(f"it has no key {'.'.join(path[: depth + 1])!r}")
        held = held[key]
    return held
