"""The source of Arrow files: one column of Arrow's IPC files, Feather files and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import BadRows
from torchmix.errors import CorruptPage, SourceUnreadable, located, where_of
from torchmix.formats.arrow.column import Column, find_column
from torchmix.formats.arrow.messages import MAGIC, ArrowFile, Read, find_batches, has_rows, open_arrow
from torchmix.formats.arrow.scan import ArrowScan, read_page
from torchmix.formats.column import ColumnSource, documents_of_run, look_at_rows
from torchmix.formats.look import ID_BYTES, columns_beside, items_in, open_input, possible_leaves
from torchmix.formats.source import Documents, FileScan, FormatRow, FoundColumn, PageRun, SeenIds, scan_of_no_rows
from torchmix.recipe.build import nearest
from torchmix.storage.random_access import ByteStream, RandomAccessFile, hash_ends
from torchmix.storage.store_file import opened

# --- A look at one Arrow file: its schema and first batch -> the columns that one may train on.


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/look.py`."""
    with open_input(file) as stream:
        try:
            reader = pa.ipc.open_file(stream)
            batch = reader.get_batch(0) if reader.num_record_batches else None
        except pa.ArrowInvalid:  # a stream has no footer
            stream.seek(0)
            reader = pa.ipc.open_stream(stream)
            batch = next(iter(reader), None)
        items = []
        if batch is not None and batch.nbytes:
            items = list(items_in(batch, possible_leaves(reader.schema), batch.num_rows / batch.nbytes))
        yield from items
        for name, kind in columns_beside(items, reader.schema):
            top = reader.schema.get_field_index(name.partition(".")[0])
            held = 0 if batch is None or not batch.nbytes or top < 0 else batch.column(top).nbytes / batch.nbytes
            yield FoundColumn(name=name, kind=kind, per_byte=held / ID_BYTES if kind == "tokens" else held)


# --- Other columns of an Arrow file or stream: the properties of its rows.
#
# Rows are those of the file, in order, so they fit those of a scan. Cost: the batches are read once; of other columns
# the bytes are read, and not kept.


def read_properties(path: str | Path, columns: Sequence[str], where: str) -> pa.Table:
    """The named top-level columns of a file.

    Raises:
        SourceUnreadable: No such file or column, or not an Arrow file, which is `where`.
    """
    with opened(path, where) as file:
        is_file = file.read(0, len(MAGIC)) == MAGIC
        try:
            stream = pa.PythonFile(ByteStream(file), mode="r")
            reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
            names = reader.schema.names
            for column in columns:
                if column not in names:
                    raise SourceUnreadable(
                        f"it has no column {column!r} for a property{nearest(column, names)}; it has {', '.join(names)}"
                    )
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            schema = pa.schema([reader.schema.field(column) for column in columns])
            return pa.Table.from_batches([batch.select(list(columns)) for batch in batches], schema=schema)
        except pa.ArrowException as error:
            raise SourceUnreadable(f"its properties cannot be read: {error}") from None


# --- The source: its scan, and the documents of its pages.
#
# A scan decodes every page as it is decoded later. Without compression, rows of lists of integers and of strings are
# read by pages of about 64 KiB of their values, however many a batch has; of any other column, and of a compressed
# one, a page is a batch. Cost: a scan reads and decodes the column once, other columns never.


class ArrowSource(ColumnSource, frozen=True, kw_only=True):
    """A source of the recipe whose files are Arrow's; implements `source.FormatSource`."""

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return "arrow"

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.FormatSource.fingerprint`; the hash covers the file's beginning, too."""
        return hash_ends(file)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `FormatSource.check`."""
        with opened(path, where_of(self.name, path)) as opened_file:
            num_bytes, _ = hash_ends(opened_file)
            self._find_column(open_arrow(opened_file.read, num_bytes), opened_file.read)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.FormatSource.scan`; `progress` is called after each record batch."""
        with opened(path, where_of(self.name, path)) as opened_file:
            num_bytes, digest = hash_ends(opened_file)
            read = opened_file.read
            file = open_arrow(read, num_bytes)
            found = self._find_column(file, read)
            if found is None:
                return scan_of_no_rows(num_bytes, digest, bad)
            column, dictionary_id = found
            if len(file.schema) == 1:
                opened_file.will_read(0, num_bytes)
            scan = ArrowScan(path=str(path), read=read, column=column, look=self._look, bad=bad)
            for batch in find_batches(file, read, dictionary_id):
                num_column_bytes = scan.add(batch)
                if progress is not None:
                    progress(num_column_bytes)
        return scan.as_scan(num_bytes, digest)

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return read_properties(path, columns, where_of(self.name, path))

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `source.FormatSource.decode`; a row without tokens is read as null, which gives none either."""
        return list(map(self._documents, runs))

    def _find_column(self, file: ArrowFile, read: Read) -> tuple[Column, int | None] | None:
        """As `find_column`; None in a file without rows whose column is missing or of another type."""
        try:
            return find_column(file, self.column, self.kind)
        except SourceUnreadable:
            if has_rows(file, read):
                raise
            return None

    def _documents(self, run: PageRun) -> Documents:
        is_null = np.zeros(run.num_rows, dtype=bool) if run.tokens is None else run.tokens == 0
        try:
            array = read_page(run, is_null)
        except ValueError as error:
            raise CorruptPage(
                f"the page at bytes [{run.offset}, {run.offset + len(run.pages)}), rows [{run.first_row}, "
                f"{run.first_row + run.num_rows}), does not decode: {' '.join(str(error).split())}; the file was "
                "altered after it was indexed: put it back, or run torchmix index",
                where_of(self.name, run.path),
                offset=run.offset,
            ) from None
        with located(where_of(self.name, run.path)):
            return documents_of_run([array], self.kind, run)

    def _look(self, array: pa.Array, first_row: int, bad: BadRows | None) -> tuple[Int64Array, SeenIds | None]:
        return look_at_rows(array, self.kind, first_row, self.tokenizer, bad)


FORMAT = FormatRow(make_source=ArrowSource, look=look)
