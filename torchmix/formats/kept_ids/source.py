"""Files of kept ids as the seam of formats wants them.

In: a file's path, later the bytes of its pages. Out: an identity, and `Documents`. Must hold: it is never indexed: its
pages are those of the data file that the ids were made of; lengths are the catalog's. Cost: none beside reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from torchmix.catalog.bad_rows import BadRows
from torchmix.errors import CorruptPage, SourceUnreadable, where_of
from torchmix.formats.found_column import FoundColumn
from torchmix.formats.kept_ids.ids_file import digest_of_end, read_end
from torchmix.formats.source import Documents, FileScan, PageRun, offsets_of
from torchmix.storage.random_access import RandomAccessFile
from torchmix.transform.row_encoder import RowEncoder

FORMAT = "kept ids"
"""Its row of the table; no recipe has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptIdsSource:
    """Ids that were kept of a source; implements `source.Source`."""

    name: str
    transform_id: str
    """That of the source."""
    vocab_size: int | None
    """That of the source."""

    @property
    def format(self) -> str:
        """See `source.Source.format`."""
        return FORMAT

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `source.Source.row_encoder`."""
        return None

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.Source.fingerprint`."""
        try:
            return file.num_bytes, digest_of_end(read_end(file))
        except ValueError as error:
            raise SourceUnreadable(
                f"source {self.name!r}: ids kept in {path} are damaged ({error}); delete the file, or run torchmix "
                "index --keep-tokens"
            ) from None

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `source.Source.check`."""
        raise NotImplementedError("kept ids are not indexed")

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.Source.scan`."""
        raise NotImplementedError("kept ids are not indexed")

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `source.Source.properties`."""
        raise NotImplementedError("kept ids have no columns")

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `source.Source.decode`; the lengths are the catalog's."""
        return list(map(self._documents, runs))

    def _documents(self, run: PageRun) -> Documents:
        assert run.tokens is not None, "kept ids are read with the catalog's lengths"
        offsets = offsets_of(run.tokens)
        values = np.frombuffer(run.pages, np.dtype(run.schema.decode()))
        if len(values) != offsets[-1]:
            raise CorruptPage(
                f"it has {len(values)} ids for rows [{run.first_row}, {run.first_row} + {run.num_rows}), the catalog "
                f"has {offsets[-1]}; delete the file, or run torchmix index --keep-tokens",
                where_of(self.name, run.path),
                offset=run.offset,
            )
        return Documents(values=values, offsets=offsets)


def look(file: str) -> Iterator[FoundColumn]:
    """See `table.FormatRow.look`: these files are for no recipe."""
    yield from ()
