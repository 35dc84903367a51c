"""The source of JSON lines: one key of each line, read by pages of about 64 KiB."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import BadRows
from torchmix.errors import CatalogError, CorruptPage, SourceUnreadable, located, where_of
from torchmix.formats.column import ColumnSource, documents_of_run, look_at_rows, passes_over_rows
from torchmix.formats.jsonl.frames import codec_of_name
from torchmix.formats.jsonl.lines import (
    BYTE_ORDER_MARK,
    MOST_LINE_BYTES,
    PLAIN,
    LineFault,
    LinePage,
    LineParser,
    Read,
    about_line,
    cut_pages,
    hint_of_line,
    is_alone,
    lines_of_page,
    read_properties,
)
from torchmix.formats.look import FIRST_BYTES, are_messages, flat_items, kind_of_paths, known_by, open_input
from torchmix.formats.source import (
    Documents,
    FileScan,
    FormatRow,
    FoundColumn,
    FoundKind,
    PageRun,
    SeenIds,
    join_seen,
)
from torchmix.storage.random_access import RandomAccessFile, hash_ends
from torchmix.storage.store_file import opened

# --- A look at one file of JSON lines: its first lines -> the keys that one may train on.

LOOK_BYTES = 1 << 20
LOOK_LINES = 200
SHOWN_KEYS = 5


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/look.py`."""
    codec = codec_of_name(file)
    with open_input(file) as stream:
        lines_of = pa.CompressedInputStream(stream, codec) if codec is not None else stream
        content = more = lines_of.read(LOOK_BYTES)
        while more and b"\n" not in more and len(content) < MOST_LINE_BYTES:  # the first line, however long
            more = lines_of.read(len(content))
            content += more
        is_cut = bool(more) and bool(lines_of.read(1))
        read_bytes = max(1, stream.tell())
    content = content.removeprefix(BYTE_ORDER_MARK)
    lines = content.splitlines()
    if is_cut and len(lines) > 1:
        lines.pop()
    rows = {number: _row(line, file, number) for number, line in enumerate(lines[:LOOK_LINES], start=1) if line.strip()}
    found = list(_columns(list(rows.values()), lines[:LOOK_LINES], len(content) / read_bytes))
    if not found and any(_may_be_trained_on(value) for row in rows.values() for value in row.values()):
        raise SourceUnreadable(
            f"{file}: no key holds text, ids or messages in each of its first {len(rows)} lines: {_unlike(rows)}; "
            "mend the lines, or name a key in the recipe, where `bad_rows: mask` passes over lines without it"
        )
    yield from found


def _may_be_trained_on(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value))


def _unlike(rows: Mapping[int, dict[str, Any]]) -> str:
    """Where keys with something to train on are missing, or hold something else."""
    said = []
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        held = {number: row[name] for number, row in rows.items() if row.get(name) is not None}
        if not any(map(_may_be_trained_on, held.values())):
            continue
        missing = next((number for number, row in rows.items() if name not in row), None)
        kinds: dict[str, int] = {}
        for number, value in held.items():
            kinds.setdefault(_KIND_NAMES.get(type(value), "an object"), number)
        if missing is not None:
            said.append(f"{name!r} is missing in line {missing}")
        else:
            said.append(f"{name!r} holds " + ", ".join(f"{kind} in line {line}" for kind, line in kinds.items()))
    return ", ".join(said[:SHOWN_KEYS])


_KIND_NAMES = {str: "text", int: "a number", float: "a number", bool: "a truth value", list: "a list"}


def _columns(rows: Sequence[dict[str, Any]], lines: Sequence[bytes], expansion: float) -> Iterator[FoundColumn]:
    """What may be trained on in the first lines; `expansion`: bytes of content for each byte of the file."""
    seen_bytes = max(1, sum(map(len, lines)))
    names = set(rows[0]).intersection(*rows) if rows else set()
    for name in (name for name in (rows[0] if rows else ()) if name in names):
        values = [row[name] for row in rows if row[name] is not None]
        is_tokens = any(values) and all(
            isinstance(value, list) and all(type(item) is int for item in value) for value in values
        )
        paths = [path for value in values for path in (value if isinstance(value, list) else [value])]
        if (kind := kind_of_paths(paths)) is not None:
            yield FoundColumn(name=name, kind="item paths", per_byte=0, example=paths[0], items=kind)
        elif are_messages(values):
            held = sum(len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")) for value in values)
            yield FoundColumn(name=name, kind="messages", per_byte=held / seen_bytes * expansion)
        elif is_tokens or (values and all(isinstance(value, str) for value in values)):
            held = sum(len(value) if is_tokens else len(value.encode("utf-8", "replace")) for value in values)
            kind_of_value: FoundKind = "tokens" if is_tokens else "text"
            yield FoundColumn(name=name, kind=kind_of_value, per_byte=held / seen_bytes * expansion)


def _row(line: bytes, file: str, number: int) -> dict[str, Any]:
    """The keys of a line, those of objects in it by their paths."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        if number == 1 and (known := known_by(line[:FIRST_BYTES], "jsonl")):
            raise SourceUnreadable(f"{file}: {known}") from None
        what = about_line(line, error)
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}{hint_of_line(line)}"
        if isinstance(error, UnicodeDecodeError):
            what = f"it is not UTF-8: {error.reason} at its byte {error.start}; write the file as UTF-8, as by `iconv`"
        raise SourceUnreadable(f"{file}: line {number} is no JSON: {what}") from None
    if not isinstance(row, dict):
        what = hint_of_line(line) or f": {line[:60]!r}"
        raise SourceUnreadable(f"{file}: line {number} is no object, with a key for each column{what}")
    return dict(flat_items(row))


# --- The source: its scan, and the documents of its pages.
#
# A scan parses every page as it is parsed later. A line that is at fault ends the scan with its number and place; a
# missing key is such a fault, a null is a document of no tokens. Cost: a scan reads and parses the file once; the
# parser holds Python's lock, so that many threads scan hardly faster than one.


class JsonLinesSource(ColumnSource, frozen=True, kw_only=True, dict=True):
    """A source of the recipe whose files are JSON lines; implements `source.FormatSource`."""

    @cached_property
    def _parser(self) -> LineParser:
        return LineParser(self.column, self.kind)

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return "jsonl"

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.FormatSource.fingerprint`; the hash covers the file's beginning, too."""
        return hash_ends(file)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `source.FormatSource.check`; the lines of the first page are looked at."""
        self._read(path, most_pages=1, progress=None, bad=bad)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.FormatSource.scan`; `progress` is called after each page."""
        return self._read(path, most_pages=None, progress=progress, bad=bad)

    def _read(
        self,
        path: str | Path,
        *,
        most_pages: int | None,
        progress: Callable[[int], None] | None,
        bad: BadRows | None,
    ) -> FileScan:
        """Parse the first pages of a file, or all."""
        with opened(path, where_of(self.name, path)) as file:
            num_bytes, digest = self.fingerprint(file, str(path))
            if most_pages is None:
                file.will_read(0, num_bytes)
            found = _Found(bad=bad)
            for page in islice(cut_pages(file.read, codec_of_name(str(path))), most_pages):
                found.add(page, self._parse, self._look, _checksum(page, file.read))
                if progress is not None:
                    progress(page.num_bytes)
        return found.as_scan(num_bytes, digest)

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return read_properties(path, columns, where_of(self.name, path))

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        return list(map(self._documents, runs))

    def _documents(self, run: PageRun) -> Documents:
        faults: dict[int, LineFault] | None = {} if passes_over_rows(run) else None
        try:
            lines = lines_of_page(run.pages, run.kind, run.num_rows)
            values = self._parse(lines, is_first=run.offset == 0, faults=faults)
            for row, fault in (faults or {}).items():
                if run.tokens is not None and run.tokens[row]:
                    raise fault
        except (ValueError, OSError) as error:
            raise CorruptPage(
                f"the page at bytes [{run.offset}, {run.offset + len(run.pages)}), within rows "
                f"[{run.first_row}, {run.first_row + run.num_rows}), does not decode: {' '.join(str(error).split())}; "
                "the file was altered after it was indexed: put it back, or run torchmix index",
                where_of(self.name, run.path),
                offset=run.offset,
            ) from None
        with located(where_of(self.name, run.path)):
            return documents_of_run([values], self.kind, run)

    def _parse(self, lines: bytes | memoryview, is_first: bool, faults: dict[int, LineFault] | None = None) -> pa.Array:
        if is_first and lines[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK:
            lines = lines[len(BYTE_ORDER_MARK) :]
        return self._parser.parse(lines, faults)

    def _look(self, values: pa.Array, first_row: int, bad: BadRows | None) -> tuple[Int64Array, SeenIds | None]:
        return look_at_rows(values, self.kind, first_row, self.tokenizer, bad)


class _Found(msgspec.Struct, kw_only=True):
    """What a scan has found so far."""

    bad: BadRows | None
    num_lines: int = 0
    num_rows: int = 0
    offset: list[int] = msgspec.field(default_factory=list)
    num_bytes: list[int] = msgspec.field(default_factory=list)
    kind_of_page: list[int] = msgspec.field(default_factory=list)
    crc: list[int] = msgspec.field(default_factory=list)
    rows: list[int] = msgspec.field(default_factory=list)
    tokens: list[Int64Array] = msgspec.field(default_factory=list)
    ids: list[SeenIds | None] = msgspec.field(default_factory=list)

    def add(
        self,
        page: LinePage,
        parse: Callable[[bytes, bool, dict[int, LineFault] | None], pa.Array],
        look: Callable[[pa.Array, int, BadRows | None], tuple[Int64Array, SeenIds | None]],
        crc: int,
    ) -> None:
        """Parse a page; one without rows is passed over."""
        faults: dict[int, LineFault] | None = None if self.bad is None else {}
        try:
            values = parse(page.lines, page.offset == 0, faults)
        except LineFault as fault:
            raise self._at_line(fault, page) from None
        for row, met in (faults or {}).items():
            assert self.bad is not None, "it takes the faults"
            self.bad.add(self.num_rows + row, f"line {self.num_lines + met.line + 1}: {met}")
        self.num_lines += page.lines.count(b"\n")
        if not len(values):
            return
        self.offset.append(page.offset)
        self.num_bytes.append(page.num_bytes)
        self.kind_of_page.append(page.kind)
        self.crc.append(crc)
        self.rows.append(len(values))
        tokens, ids = look(values, self.num_rows, self.bad)
        self.tokens.append(tokens)
        self.ids.append(ids)
        self.num_rows += len(values)

    def as_scan(self, num_bytes: int, digest: str) -> FileScan:
        """The scan of a file of this size and identity."""
        # Pages that begin and end with lines share a chunk, since they are decoded together; any other has its own.
        alone = np.array([is_alone(kind) for kind in self.kind_of_page], dtype=bool)
        starts_chunk = alone | np.concatenate([[True], alone[:-1]]) if len(alone) else alone
        kinds = np.array(self.kind_of_page, dtype=np.int8)[starts_chunk]
        return FileScan(
            num_bytes=num_bytes,
            footer_hash=digest,
            num_rows=self.num_rows,
            chunk_of_page=np.cumsum(starts_chunk, dtype=np.int32) - np.int32(1),
            page_offset=np.array(self.offset, dtype=np.int64),
            page_bytes=np.array(self.num_bytes, dtype=np.int64),
            page_rows=np.array(self.rows, dtype=np.int64),
            kind=kinds,
            page_crc=np.array(self.crc, dtype=np.uint32),
            tokens=np.concatenate([np.zeros(0, np.int64), *self.tokens]).astype(np.int32),
            ids=join_seen(self.ids),
            schema=b"",
            bad=self.bad,
        )

    def _at_line(self, fault: LineFault, page: LinePage) -> CatalogError:
        if not fault.is_json and page.first_byte + fault.offset == 0:
            known = known_by(bytes(page.lines[:FIRST_BYTES]), "jsonl")
            if known:
                return SourceUnreadable(known)
        line = self.num_lines + fault.line + 1
        message = f"line {line}, at byte {page.first_byte + fault.offset}: {fault}"
        if fault.is_json:
            return SourceUnreadable(f"{message}; mend the line, or name another key")
        return CorruptPage(f"{message}; mend the line, or take it out")


def _checksum(page: LinePage, read: Read) -> int:
    """CRC-32 of a page's bytes; that of a gzip member covers what is in it, and not which member it is."""
    return zlib.crc32(page.lines if page.kind == PLAIN else read(page.offset, page.num_bytes))


FORMAT = FormatRow(make_source=JsonLinesSource, look=look)
