"""The column of images of a source, as a source of its own: a document is the bytes of a row.

In: the format's own source of that column, in which a row has one image, several or none. A document is the bytes of
the images of its row, end to end. Out: `FileScan` with the sizes of all images as items, and later the bytes
of any row. Must hold: rows are those of the texts. Cost: a scan reads the column and the headers in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from torchmix.catalog.bad_rows import BadRows
from torchmix.errors import SourceUnreadable
from torchmix.formats.images.headers import IMAGE, HeaderScan
from torchmix.formats.source import Documents, FileScan, FormatSource, PageRun
from torchmix.recipe.source.image_structs import Images
from torchmix.storage.random_access import RandomAccessFile
from torchmix.transform.images.header import HEADER_VERSION
from torchmix.transform.images.raw_bytes import RawBytes, See
from torchmix.transform.images.rule import SizeRule
from torchmix.transform.row_encoder import RowEncoder

MakeSource = Callable[[str, RawBytes], FormatSource]
"""Column and transform -> the format's own source."""


class ImageColumn(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `source.FormatSource`; its tokens are bytes."""

    name: str
    images: Images
    folder: str | None
    """What paths in the column are relative to; None: it holds images."""
    rule: SizeRule
    make: MakeSource

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return self._inner().format

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        kind = "" if self.folder is None else "paths"
        placed = "" if self.images.place is None else f":{self.images.place}"
        return f"images-{HEADER_VERSION}:{self.images.most_pixels}:{kind}:{self.rule.rule_id}{placed}"

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
            rule=self.rule,
            most_pixels=self.images.most_pixels,
            masks_bad=bad is not None,
        )
        column = self._column(path)
        scan = self._inner(column, headers.see).scan(path, progress, bad)
        other = self._other_field(column, path)
        if headers.has_nulls and other is not None:
            self._inner(other, headers.see_other_field).scan(path, None, None if bad is None else BadRows())
        if bad is not None:
            for row, reason in sorted(headers.faults.items()):
                bad.add(row, reason)
        return replace(scan, items={IMAGE: headers.table(scan.num_rows)})

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `FormatSource.properties`."""
        return self._inner().properties(path, columns)

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        return self._inner().decode(runs)

    def _column(self, path: str | Path) -> str:
        """The column; of a struct of images its field `bytes`, or `path` where the column holds paths."""
        column = self.images.column
        try:
            self._inner().check(path, BadRows())
        except SourceUnreadable as error:
            field = f"{column}.{'bytes' if self.folder is None else 'path'}"
            if "is a struct" not in str(error) or field not in str(error):
                raise
            return field
        return column

    def _other_field(self, column: str, path: str | Path) -> str | None:
        """Where a struct of images has `bytes` and `path`, the one that is not `column`."""
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
        return self.make(column or self.images.column, raw)
