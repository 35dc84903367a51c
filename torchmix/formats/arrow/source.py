"""The source of Arrow files: one column of Arrow's IPC files, Feather files and streams.

In: a file's path; later the bytes of its pages. Out: `FileScan` and `Documents`, see source.py. Must hold: a scan
decodes every page as it is decoded later. Without compression, rows of lists of integers and of strings are read by
pages of about 64 KiB of their values, however many a batch has; of any other column, and of a compressed one, a page is
a batch. Cost: a scan reads and decodes the column once, other columns never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.catalog.bad_rows import BadRows
from torchmix.errors import CorruptPage, located, where_of
from torchmix.formats.arrow.batches import find_batches, open_arrow
from torchmix.formats.arrow.column import find_column
from torchmix.formats.arrow.page import read_page
from torchmix.formats.arrow.properties import read_properties
from torchmix.formats.arrow.scan import ArrowScan
from torchmix.formats.column_source import ColumnSource
from torchmix.formats.good_rows import documents_of_run, look_at_rows
from torchmix.formats.seen_ids import SeenIds
from torchmix.formats.source import Documents, FileScan, PageRun
from torchmix.storage.file_ends import hash_ends
from torchmix.storage.open_path import opened
from torchmix.storage.random_access import RandomAccessFile


class ArrowSource(ColumnSource, frozen=True, kw_only=True):
    """A source of the recipe whose files are Arrow's; implements `source.FormatSource`."""

    @property
    def format(self) -> str:
        """See `source.FormatSource.format`."""
        return "arrow"

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.FormatSource.fingerprint`; the hash covers the file's beginning, too."""
        return hash_ends(file)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `source.FormatSource.check`."""
        with opened(path, where_of(self.name, path)) as opened_file:
            num_bytes, _ = hash_ends(opened_file)
            file = open_arrow(opened_file.read, num_bytes)
            find_column(file, self.column, self.kind)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.FormatSource.scan`; `progress` is called after each record batch."""
        with opened(path, where_of(self.name, path)) as opened_file:
            num_bytes, digest = hash_ends(opened_file)
            read = opened_file.read
            file = open_arrow(read, num_bytes)
            column, dictionary_id = find_column(file, self.column, self.kind)
            if len(file.schema) == 1:
                opened_file.will_read(0, num_bytes)
            scan = ArrowScan(path=str(path), read=read, column=column, look=self._look, bad=bad)
            for batch in find_batches(file, read, dictionary_id):
                num_column_bytes = scan.add(batch)
                if progress is not None:
                    progress(num_column_bytes)
        return scan.as_scan(num_bytes, digest)

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `source.FormatSource.properties`."""
        return read_properties(path, columns, where_of(self.name, path))

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `source.FormatSource.decode`; a row without tokens is read as null, which gives none either."""
        return list(map(self._documents, runs))

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
