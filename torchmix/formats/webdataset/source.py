"""The source of WebDataset shards: one member of each sample, read by its offset.

In: a tar file's path; later the bytes of its pages. Out: `FileScan` and `Documents`, see source.py. Must hold: a row is
a sample, and its page is the member with the 512 bytes of its header, so that reading a text touches no image beside
it. Where a pattern names several members, the page reaches from the headers of the first to the end of the last. A
sample without the member, or whose member holds no text, is a bad row; its page is the header of its first member. A
sample without members of a pattern has none. Cost: a scan reads each header and the members of the column, and with an
index beside the shard (beside.py) the headers of these members alone; the catalog keeps some 20 bytes a sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.catalog.bad_rows import BadRows
from torchmix.errors import CorruptPage, SourceUnreadable, located, where_of
from torchmix.formats.column_source import ColumnSource
from torchmix.formats.good_rows import documents_of_run, look_at_rows
from torchmix.formats.source import Documents, FileScan, PageRun
from torchmix.formats.webdataset.beside import BesideIndex, index_beside
from torchmix.formats.webdataset.members import BLOCK_BYTES, Member, TarSample, samples_of, size_in_header
from torchmix.formats.webdataset.value import MemberValue
from torchmix.storage.file_ends import hash_ends
from torchmix.storage.open_path import opened
from torchmix.storage.random_access import RandomAccessFile

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
        """See `source.FormatSource.format`."""
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
        """See `source.FormatSource.decode`."""
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
