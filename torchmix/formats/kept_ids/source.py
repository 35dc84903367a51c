"""Files of kept ids as the seam of formats wants them.

In: a file's path, later the bytes of its pages. Out: an identity, and `Documents`. Must hold: it is never indexed: its
pages are those of the data file that the ids were made of; lengths are the catalog's. Cost: none beside reading.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from torchmix.errors import CorruptPage, SourceUnreadable, where_of
from torchmix.formats.kept_ids.ids_file import digest_of_end, read_end
from torchmix.formats.source import Documents, PageRun, offsets_of
from torchmix.storage.random_access import RandomAccessFile
from torchmix.transform.row_encoder import RowEncoder

FORMAT = "kept ids"
"""The format of a catalog over kept ids; no recipe has it."""


class KeptIdsSource(msgspec.Struct, frozen=True, kw_only=True):
    """Ids that were kept of a source; implements `source.PageSource`."""

    name: str

    @property
    def format(self) -> str:
        """See `source.PageSource.format`."""
        return FORMAT

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `source.PageSource.row_encoder`."""
        return None

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.PageSource.fingerprint`."""
        try:
            return file.num_bytes, digest_of_end(read_end(file))
        except ValueError as error:
            raise SourceUnreadable(
                f"source {self.name!r}: ids kept in {path} are damaged ({error}); delete the file, or run torchmix "
                "index --keep-tokens"
            ) from None

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `source.PageSource.decode`; the lengths are the catalog's."""
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
