"""A source of texts -> the same source over the ids that were kept of it.

In: an open source, and how it is read. Out: the source with other files, pages with the same numbers and rows, and how
these are read; None where ids of some file are missing. Must hold: a row has the ids that encoding it would give, by
the identity of the data file and the transform. Cost: the end of each file of ids, and some 30 bytes a page.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from torchmix.catalog.file_table import PageColumns, table_of_file
from torchmix.catalog.manifest import FileEntry
from torchmix.catalog.page_table import PageTable, join_tables
from torchmix.catalog.store import SourceCatalog
from torchmix.formats.kept_ids.ids_file import KeptFile, kept_path, read_kept
from torchmix.formats.kept_ids.source import FORMAT, KeptIdsSource

logger = logging.getLogger(__name__)


def identity_of(num_bytes: int, footer_hash: str, column: str | None, transform_id: str) -> tuple[int, str, str, str]:
    """What a file of ids belongs to; see `ids_file.kept_path`."""
    return num_bytes, footer_hash, column or "", transform_id


def in_place_of(source: SourceCatalog, folder: Path) -> tuple[SourceCatalog, KeptIdsSource] | None:
    """The source over its kept ids, and how they are read.

    Args:
        source: A source whose rows are encoded.
        folder: The catalog's.
    """
    found: list[KeptFile | None] = []
    for entry in source.files:
        if not entry.num_pages:
            found.append(None)
            continue
        identity = identity_of(entry.num_bytes, entry.footer_hash, source.column, source.transform_id)
        kept = read_kept(kept_path(folder, source.name, identity), identity)
        if kept is None or len(kept.ids_of_page) != entry.num_pages:
            return None
        found.append(kept)
    dtypes = list(dict.fromkeys(kept.dtype for kept in found if kept is not None))
    tables = [_table(source.pages.of_file(number), kept) for number, kept in enumerate(found)]
    files = [
        entry if kept is None else _entry(entry, kept, dtypes) for entry, kept in zip(source.files, found, strict=True)
    ]
    logger.info("source %r: ids kept by the index are read in the place of its texts", source.name)
    over_ids = replace(
        source,
        format=FORMAT,
        files=tuple(files),
        schemas=tuple(dtype.encode() for dtype in dtypes),
        pages=join_tables(tables),
    )
    return over_ids, KeptIdsSource(name=source.name)


def _entry(entry: FileEntry, kept: KeptFile, dtypes: list[str]) -> FileEntry:
    return msgspec.structs.replace(
        entry,
        path=str(kept.path.absolute()),
        num_bytes=kept.num_bytes,
        footer_hash=kept.digest,
        schema=dtypes.index(kept.dtype),
        num_bad_rows=0,
        bad_rows=(),
        status=(),
    )


def _table(pages: PageTable, kept: KeptFile | None) -> PageTable:
    """The pages of one file, at their places among its ids."""
    if kept is None:
        return pages
    page_bytes = kept.ids_of_page * np.dtype(kept.dtype).itemsize
    first_row = np.asarray(pages.first_row)
    columns = PageColumns(
        chunk_of_page=np.zeros(len(page_bytes), np.int32),
        page_offset=np.cumsum(page_bytes) - page_bytes,
        page_bytes=page_bytes,
        page_rows=np.diff(first_row),
        page_crc=kept.crc_of_page,
        kind=np.zeros(1, np.int8),
    )
    return table_of_file(columns)
