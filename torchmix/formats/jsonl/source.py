"""The source of JSON lines: one key of each line, read by pages of about 64 KiB."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
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
from torchmix.formats.column import ColumnSource
from torchmix.formats.good_rows import documents_of_run, look_at_rows, passes_over_rows
from torchmix.formats.jsonl.frames import codec_of_name
from torchmix.formats.jsonl.lines import (
    BYTE_ORDER_MARK,
    PLAIN,
    LineFault,
    LinePage,
    LineParser,
    Read,
    cut_pages,
    is_alone,
    lines_of_page,
    read_properties,
)
from torchmix.formats.look import are_messages, flat_items, kind_of_paths, open_input
from torchmix.formats.source import Documents, FileScan, FormatRow, FoundColumn, PageRun, SeenIds, join_seen
from torchmix.storage.random_access import RandomAccessFile, hash_ends
from torchmix.storage.store_file import opened

# --- A look at one file of JSON lines: its first lines -> the keys that one may train on.

LOOK_BYTES = 1 << 20
LOOK_LINES = 200


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/look.py`."""
    codec = codec_of_name(file)
    with open_input(file) as stream:
        lines_of = pa.CompressedInputStream(stream, codec) if codec is not None else stream
        content = lines_of.read(LOOK_BYTES)
        read_bytes = max(1, stream.tell())
    lines = content.splitlines()
    if len(content) == LOOK_BYTES and len(lines) > 1:
        lines.pop()  # it may be cut
    rows = [_row(line, file) for line in lines[:LOOK_LINES] if line.strip()]
    seen_bytes = max(1, sum(len(line) for line in lines[:LOOK_LINES]))
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
            yield FoundColumn(name=name, kind="messages", per_byte=held / seen_bytes * len(content) / read_bytes)
        elif is_tokens or (values and all(isinstance(value, str) for value in values)):
            held = sum(len(value) if is_tokens else len(value.encode("utf-8", "replace")) for value in values)
            per_byte = held / seen_bytes * len(content) / read_bytes
            yield FoundColumn(name=name, kind="tokens" if is_tokens else "text", per_byte=per_byte)


def _row(line: bytes, file: str) -> dict[str, Any]:
    """The keys of a line, those of objects in it by their paths."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SourceUnreadable(f"{file}: a line is no JSON ({error}): {line[:60]!r}") from None
    if not isinstance(row, dict):
        raise SourceUnreadable(f"{file}: a line is no object, with a key for each column: {line[:60]!r}")
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
        line = self.num_lines + fault.line + 1
        message = f"line {line}, at byte {page.first_byte + fault.offset}: {fault}"
        if fault.is_json:
            return SourceUnreadable(f"{message}; mend the line, or name another key")
        return CorruptPage(f"{message}; mend the line, or take it out")


def _checksum(page: LinePage, read: Read) -> int:
    """CRC-32 of a page's bytes; that of a gzip member covers what is in it, and not which member it is."""
    return zlib.crc32(page.lines if page.kind == PLAIN else read(page.offset, page.num_bytes))


FORMAT = FormatRow(make_source=JsonLinesSource, look=look)
