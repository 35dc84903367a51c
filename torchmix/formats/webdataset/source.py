"""The source of WebDataset shards: one member of each sample, read by its offset."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import BadRows
from torchmix.errors import CorruptPage, SourceUnreadable, located, where_of
from torchmix.formats.column import ColumnSource, Kind, documents_of_run, look_at_rows
from torchmix.formats.items import PLACED, PlacedValues
from torchmix.formats.look import are_messages, flat_items, kind_of
from torchmix.formats.source import Documents, FileScan, FormatRow, FoundColumn, FoundKind, PageRun
from torchmix.formats.webdataset.members import (
    BLOCK_BYTES,
    BesideIndex,
    Member,
    TarSample,
    index_beside,
    samples_of,
    size_in_header,
)
from torchmix.modalities.table import KINDS, kind_named
from torchmix.storage.random_access import RandomAccessFile, hash_ends
from torchmix.storage.store_file import opened

# --- Members of a sample -> the text, or bytes, that a source reads of it.
#
# `txt` is the member of that suffix, `json.a.b` the value at the keys `a` and `b` of the member `json`, `jpg|png` the
# first of these members that a sample has, and `*.jpg|*.png` all members whose suffix has one of these patterns, in
# the order of the file. Cost: parsing the JSON.

logger = logging.getLogger(__name__)

JSON = "json"
_PATTERN = frozenset("*?[")


class MemberValue(msgspec.Struct, frozen=True, kw_only=True):
    """What a column names."""

    suffixes: tuple[str, ...]
    """The member's; the first one that a sample has counts. Or patterns."""
    keys: tuple[str, ...] = ()
    """Keys that lead to the value in a member of JSON."""
    is_pattern: bool = False
    """Whether all members with such a suffix count."""
    placed: PlacedValues | None = None
    """Where items stand in a list of texts, in the member of JSON."""

    @classmethod
    def of(cls, column: str) -> MemberValue:
        """From the recipe's word, or a `placed_column` of it."""
        if PLACED in column:
            column, _, place = column.partition(PLACED)
            inner, prefix = cls.of(column), f"{JSON}."
            if not place.startswith(prefix) or not (inner.is_pattern or inner.keys):
                raise SourceUnreadable(f"the place of items is {place!r}; it must be keys of json, as json.a.b")
            placed = PlacedValues(values=inner.keys, places=tuple(place.removeprefix(prefix).split(".")))
            return replace(inner, placed=placed)
        head, _, rest = column.partition(".")
        if head.lower() == JSON and rest:
            return cls(suffixes=(JSON,), keys=tuple(rest.split(".")))
        suffixes = tuple(suffix.strip().lstrip(".").lower() for suffix in column.split("|"))
        return cls(suffixes=suffixes, is_pattern=not _PATTERN.isdisjoint(column))

    def members(self, sample: TarSample) -> list[Member]:
        """The members of a sample, in the order of the file."""
        if self.is_pattern:
            named = sample.members.items()
            patterns = self.suffixes if self.placed is None else (*self.suffixes, JSON)
            return [member for name, member in named if any(fnmatchcase(name, each) for each in patterns)]
        return [sample.members[suffix] for suffix in self.suffixes if suffix in sample.members][:1]

    def values(self, content: bytes, kind: Kind) -> list[bytes | None]:
        """The values of a member with this content; [None] for a null.

        Args:
            content: The content of the member.
            kind: What is wanted: a text, of `values` one or a list of them, of `json` anything.

        Raises:
            ValueError: It is no JSON, or holds no such thing at the keys.
        """
        if self.placed is not None and not self.is_pattern:
            row = _parsed(content)
            if kind == "json":
                return [json.dumps(self.placed.texts(row), ensure_ascii=False).encode("utf-8", "replace")]
            return [None if name is None else name.encode("utf-8", "replace") for name in self.placed.items(row)]
        if not self.keys and (kind != "json" or self.suffixes != (JSON,)):
            return [content]
        found = _parsed(content)
        for key in self.keys:
            if not isinstance(found, dict) or key not in found:
                raise ValueError(f"it has no key {key!r}")
            found = found[key]
        if kind == "json":
            return [None if found is None else json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")]
        several = found if kind == "values" and isinstance(found, list) else [found]
        for value in several:
            if value is not None and not isinstance(value, str):
                what = f"{'.'.join(self.keys)} {'holds' if several is found else 'is'} a {type(value).__name__}"
                raise ValueError(f"{what}, not a text")
        return [None if value is None else value.encode("utf-8", "replace") for value in several]

    def in_order(self, members: Sequence[Member], contents: list[bytes]) -> list[bytes]:
        """Contents of the members of a pattern, in the order of their places where they have some.

        Raises:
            ValueError: Places are missing, or as many as the items are not.
        """
        if self.placed is None:
            return contents
        row, items = None, []
        for member, content in zip(members, contents, strict=True):
            if member.name.rpartition("/")[2].partition(".")[2].lower() == JSON:
                row = _parsed(content)
            else:
                items.append(content)
        if row is None and items:
            raise ValueError("its sample has no member json with the places of its items")
        return self.placed.in_order(row, items) if row is not None else []


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None


# --- A look at one shard: its first samples -> the members that one may train on.

LOOKED_AT = 16
TEXTS = ("txt", "text", "md")


def look(file: str) -> Iterator[FoundColumn]:
    """The members of text and of items, by suffix, and the keys of those of JSON; see `formats/look.py`."""
    with opened(file, file) as shard:
        samples = list(islice(samples_of(shard.read, shard.num_bytes), LOOKED_AT))
        rows = [
            {suffix: shard.read(member.offset, member.num_bytes) for suffix, member in sample.members.items()}
            for sample in samples
        ]
    whole = max(1, sum(len(content) for row in rows for content in row.values()))
    suffixes = sorted({suffix for row in rows for suffix in row})
    for kind in KINDS:
        yield from _members_of(kind, rows, suffixes, whole)
    for suffix in suffixes:
        contents = [row[suffix] for row in rows if suffix in row]
        if suffix in TEXTS:
            yield FoundColumn(name=suffix, kind="text", per_byte=sum(map(len, contents)) / whole)
        elif suffix == "json":
            yield from _keys(contents, whole)


def _members_of(kind: str, rows: list[dict[str, bytes]], suffixes: list[str], whole: int) -> Iterator[FoundColumn]:
    """Members of a kind: `jpg|png` where a sample has one of them, `*.jpg` where it has several that are numbered."""
    found = [s for s in suffixes if all(kind_of(row[s]) == kind for row in rows if s in row)]
    plain = [s for s in found if "." not in s]
    ways = [f"*.{end}" for end in sorted({s.rpartition(".")[2] for s in found if s not in plain})]
    if plain and all(len(set(plain) & row.keys()) <= 1 for row in rows):
        ways.insert(0, "|".join(plain))
    else:
        ways = plain + ways
    for way in ways:
        ends = set(way.removeprefix("*.").split("|"))
        contents = [
            content
            for row in rows
            for suffix, content in row.items()
            if suffix in found and (suffix in ends if "*" not in way else suffix.rpartition(".")[2] in ends)
        ]
        tokens = sum(map(kind_named(kind).usual_tokens, contents))
        of_item = tokens / max(1, len(contents))
        yield FoundColumn(name=way, kind="items", per_byte=tokens / whole, items=kind, item_tokens=of_item)


def _keys(contents: list[bytes], whole: int) -> Iterator[FoundColumn]:
    """Keys of the members of JSON whose values are texts or messages, in all of them."""
    rows: list[dict[str, Any]] = []
    for content in contents:
        try:
            row = json.loads(content)
        except ValueError:
            return
        if not isinstance(row, dict):
            return
        rows.append(dict(flat_items(row, "json.")))
    for name in rows[0]:
        values = [row[name] for row in rows if row.get(name) is not None]
        kind: FoundKind | None = None
        if all(name in row for row in rows) and values:
            kind = "messages" if are_messages(values) else "text" if all(isinstance(v, str) for v in values) else None
        if kind is not None:
            texts = values if kind == "text" else [json.dumps(value, ensure_ascii=False) for value in values]
            held = sum(len(text.encode("utf-8", "replace")) for text in texts)
            yield FoundColumn(name=name, kind=kind, per_byte=held / whole)


# --- The source: its scan, and the documents of its pages.
#
# A row is a sample, and its page is the member with the 512 bytes of its header, so that reading a text touches no
# image beside it. Where a pattern names several members, the page reaches from the headers of the first to the end of
# the last. A sample without the member, or whose member holds no text, is a bad row; its page is the header of its
# first member. A sample without members of a pattern has none. Cost: a scan reads each header and the members of the
# column, and with an index beside the shard (members.py) the headers of these members alone; the catalog keeps some 20
# bytes a sample.

Values = list[bytes | None]
"""The values of one row; a text is at most one."""

BATCH_BYTES = 1 << 20
"""Values that a scan looks at together, or one."""


class WebDatasetSource(ColumnSource, frozen=True, kw_only=True, dict=True):
    """A source of the recipe whose files are tar shards; implements `source.FormatSource`."""

    @cached_property
    def _value(self) -> MemberValue:
        return MemberValue.of(self.column)

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return "webdataset"

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.FormatSource.fingerprint`; the hash covers the file's beginning, too."""
        return hash_ends(file)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `source.FormatSource.check`; the first sample is looked at."""
        with opened(path, where_of(self.name, path)) as file:
            self._check_kind()
            index = index_beside(path, file.num_bytes)
            samples = samples_of(file.read, file.num_bytes) if index is None else index.samples(file.read)
            sample = next(samples, None)
            if sample is None:
                raise SourceUnreadable("it holds no samples")
            if bad is None:
                self._read(file, sample, 0, None, index)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.FormatSource.scan`; `progress` is called after each batch."""
        pages, tokens, batch = _TarPages(), list[Int64Array](), list[Values]()
        batch_bytes = told_bytes = 0
        with opened(path, where_of(self.name, path)) as file:
            self._check_kind()
            num_bytes, digest = self.fingerprint(file, str(path))
            index = index_beside(path, num_bytes)
            if index is None:
                file.will_read(0, num_bytes)

            def look() -> None:
                nonlocal batch_bytes, told_bytes
                array = self._array(batch)
                counts, _ = look_at_rows(array, self.kind, len(pages.offset) - len(batch), self.tokenizer, bad)
                tokens.append(counts)
                batch.clear()
                batch_bytes = 0
                if progress is not None:
                    progress(pages.offset[-1] - told_bytes)
                    told_bytes = pages.offset[-1]

            for sample in samples_of(file.read, num_bytes) if index is None else index.samples(file.read):
                page, values = self._read(file, sample, len(pages.offset), bad, index)
                pages.add(page.offset, page.content)
                batch.append(values)
                batch_bytes += sum(len(value or b"") for value in values)
                if batch_bytes >= BATCH_BYTES:
                    look()
            if batch:
                look()
            if num_bytes and any(file.read(max(0, num_bytes - BLOCK_BYTES), BLOCK_BYTES)):
                logger.warning(
                    "source %r: %s ends behind sample %d without tar's end mark, as one that was cut short; if it "
                    "was, copy the shard again and index it",
                    self.name,
                    path,
                    len(pages.offset),
                )
        return FileScan(
            num_bytes=num_bytes,
            footer_hash=digest,
            num_rows=len(pages.offset),
            chunk_of_page=np.zeros(len(pages.offset), np.int32),
            page_offset=np.array(pages.offset, np.int64),
            page_bytes=np.array(pages.num_bytes, np.int64),
            page_rows=np.ones(len(pages.offset), np.int64),
            kind=np.zeros(min(1, len(pages.offset)), np.int8),
            page_crc=np.array(pages.crc, np.uint32),
            tokens=np.concatenate([np.zeros(0, np.int64), *tokens]).astype(np.int32),
            schema=b"",
            bad=bad,
        )

    def _read(
        self,
        file: RandomAccessFile,
        sample: TarSample,
        row: int,
        bad: BadRows | None,
        index: BesideIndex | None,
    ) -> tuple[_TarPage, Values]:
        """The page of a sample, and its values; none where it is null or bad. Where its place is from `index`, headers
        are compared with it."""
        members = self._value.members(sample)
        if members:
            first = members[0]
            offset = first.begin if self._value.is_pattern else first.offset - BLOCK_BYTES
            page = _TarPage(offset=offset, content=file.read(offset, members[-1].stop - offset))
            contents: list[bytes] = []
            for member in members:
                if index is not None:
                    index.check_header(member, page.content[member.offset - BLOCK_BYTES - offset :][:BLOCK_BYTES])
                contents.append(page.content[member.offset - offset : member.stop - offset])
            try:
                return page, self._values_of(members, contents)
            except ValueError as error:
                fault = f"the member {members[-1].name!r}: {error}"
        else:
            offset = sample.first.begin if self._value.is_pattern else sample.first.offset - BLOCK_BYTES
            page = _TarPage(offset=offset, content=file.read(offset, BLOCK_BYTES))
            if self._value.is_pattern:
                return page, []
            held = ", ".join(sorted(sample.members)) or "nothing"
            fault = f"the sample {sample.key!r} has no member {'|'.join(self._value.suffixes)}; it has {held}"
        if bad is None:
            raise SourceUnreadable(f"row {row}: {fault}; mend the shard, or name another member", row=row)
        bad.add(row, fault)
        return page, []

    def _values_of(self, members: Sequence[Member], contents: list[bytes]) -> Values:
        """The values in members of a sample; ValueError where there are none such."""
        if self._value.is_pattern:
            return list(self._value.in_order(members, contents))
        return [value for content in contents for value in self._value.values(content, self.kind)]

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `source.FormatSource.properties`.

        Raises:
            SourceUnreadable: Always; members of a shard are no columns.
        """
        raise SourceUnreadable(
            f"members of a shard are no columns, so there are no {columns}", where_of(self.name, path)
        )

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        return list(map(self._documents, runs))

    def _documents(self, run: PageRun) -> Documents:
        try:
            rows = self._rows_of_samples(run) if self._value.is_pattern else self._rows_of_members(run)
        except (ValueError, CorruptPage, SourceUnreadable) as error:
            raise CorruptPage(
                f"the member whose header is at byte {run.offset}, row {run.first_row}, does not decode: "
                f"{error}; the file was altered after it was indexed: put it back, or run torchmix index",
                where_of(self.name, run.path),
                row=run.first_row,
                offset=run.offset,
            ) from None
        with located(where_of(self.name, run.path)):
            return documents_of_run([self._array(rows)], self.kind, run)

    def _rows_of_members(self, run: PageRun) -> list[Values]:
        """The values of rows that are one member each."""
        content, place, rows = memoryview(run.pages), 0, list[Values]()
        for row in range(run.num_rows):
            is_bad = run.has_bad_rows and run.tokens is not None and not run.tokens[row]
            size = size_in_header(content[place:])
            if size is None:
                raise ValueError("no header of a member")
            size = min(size, len(content) - place - BLOCK_BYTES) if run.num_rows == 1 else 0 if is_bad else size
            member = bytes(content[place + BLOCK_BYTES : place + BLOCK_BYTES + size])
            rows.append([] if is_bad else self._value.values(member, self.kind))
            place += BLOCK_BYTES + size
        return rows

    def _rows_of_samples(self, run: PageRun) -> list[Values]:
        """The values of rows that are several members each, from the first to the last."""
        content, rows = memoryview(run.pages), list[Values]()
        for sample in samples_of(lambda place, n: bytes(content[place : place + n]), len(content), is_part=True):
            members = self._value.members(sample)
            contents = [bytes(content[member.offset : member.stop]) for member in members]
            rows.append(list(self._value.in_order(members, contents)))
        if len(rows) < run.num_rows:
            rows.append([])  # the header alone of a sample without such members
        if len(rows) != run.num_rows:
            raise ValueError(f"{len(rows)} samples, not {run.num_rows}")
        return rows

    def _array(self, rows: list[Values]) -> pa.Array:
        if self.kind == "values":
            return pa.array(rows, pa.large_list(pa.large_binary()))
        return pa.array([row[0] if row else None for row in rows], pa.large_binary())

    def _check_kind(self) -> None:
        if self.kind != "values" and self._value.is_pattern:
            raise SourceUnreadable(f"{self.column!r} is a pattern; a text is one member, name it")
        if self.kind in ("tokens", "flags"):
            raise SourceUnreadable("members hold texts; name one by text, with a tokenizer")


class _TarPage(msgspec.Struct, frozen=True, kw_only=True):
    offset: int
    content: bytes


class _TarPages(msgspec.Struct, kw_only=True):
    """The pages that a scan has found."""

    offset: list[int] = msgspec.field(default_factory=list)
    num_bytes: list[int] = msgspec.field(default_factory=list)
    crc: list[int] = msgspec.field(default_factory=list)

    def add(self, offset: int, content: bytes) -> None:
        """Add the page of a row."""
        self.offset.append(offset)
        self.num_bytes.append(len(content))
        self.crc.append(zlib.crc32(content))


FORMAT = FormatRow(make_source=WebDatasetSource, look=look)
