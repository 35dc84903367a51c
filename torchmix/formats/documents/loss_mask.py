"""Ids with a column beside them that says which of them have loss, as a source.

In: the format's own sources of both columns. Out: the ids, with the runs that have no loss as items. Must hold: a row
has as many flags as ids; another number is a fault of the row. Cost: the second column is read once, by the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from torchmix.array_types import Int32Array
from torchmix.catalog.bad_rows import BadRows
from torchmix.errors import SourceUnreadable, located, where_of
from torchmix.formats.documents.item_kinds import NO_LOSS, runs_table
from torchmix.formats.source import Documents, FileScan, FormatSource, PageRun
from torchmix.storage.random_access import RandomAccessFile
from torchmix.transform.documents.loss_flags import TRANSFORM_ID, LossFlags
from torchmix.transform.row_encoder import RowEncoder


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
        return replace(scan, tokens=tokens, items={NO_LOSS: runs_table(runs, scan.num_rows)})

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
