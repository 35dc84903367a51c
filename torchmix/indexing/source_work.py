"""Sources as they are to be, against the catalog before.

In: settings of sources, their files on disk, and what the catalog says of them. Out: for each source which files stay,
and which are new or changed. Must hold: kept files were read as they would be read now; their arrays are whole. Cost:
the footers of all files, and one read of the catalog's arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from torchmix.catalog.array_files import check_content
from torchmix.catalog.manifest import SourceEntry
from torchmix.catalog.settings import SourceSettings
from torchmix.catalog.store import ARRAYS_FOLDER, SourceCatalog, open_source
from torchmix.errors import CatalogError
from torchmix.formats.images.tables import ImageTables
from torchmix.formats.source import FormatSource
from torchmix.formats.table import choose_source, find_source_files
from torchmix.indexing.file_changes import FileChange, WantedFile, match_files
from torchmix.indexing.log_lines import log_changes
from torchmix.indexing.scan_files import fingerprint_files
from torchmix.transform.maps.row_map import open_maps
from torchmix.transform.open_tokenizer import Tokenizers

logger = logging.getLogger(__name__)


class SourceWork(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One source against the catalog before."""

    name: str
    settings: SourceSettings
    source: FormatSource
    entry: SourceEntry | None
    """What the catalog says of it, if it was indexed for the same column and transform."""
    held: SourceCatalog | None
    """Its arrays, if they are whole."""
    files: tuple[WantedFile, ...]
    changes: tuple[FileChange, ...]


def compare(
    folder: Path,
    settings: Mapping[str, SourceSettings],
    base: Path,
    before: Mapping[str, SourceEntry],
    tables: ImageTables | None = None,
) -> tuple[SourceWork, ...]:
    """Compare sources with the entries that a catalog at `folder` has of them; `tables` are of their images.

    Raises:
        SourceUnreadable: A file or column is missing, or of a wrong type or format.
    """
    names = sorted(settings)
    paths = {name: find_source_files(name, settings[name], base) for name in names}
    tokenizers = Tokenizers(base)
    words = {
        name: entry.function for name, entry in ((name, settings[name].map) for name in names) if entry is not None
    }
    maps = open_maps(words, base)
    sources = {
        name: choose_source(name, settings[name], paths[name], tokenizers, maps.get(name), tables) for name in names
    }
    found = iter(fingerprint_files([(sources[name], path) for name in names for path in paths[name]], base))
    work: list[SourceWork] = []
    for name in names:
        entry = before.get(name)
        if entry is not None and not _same_reading(entry, settings[name], sources[name]):
            logger.warning(
                "source %r: format, column, tokenizer, transform or bad_rows differ from the catalog's; all is scanned",
                name,
            )
            entry = None
        files, changes = match_files(name, [next(found) for _ in paths[name]], entry.files if entry is not None else ())
        if entry is not None:
            log_changes(name, changes)
        work.append(
            SourceWork(
                name=name,
                settings=settings[name],
                source=sources[name],
                entry=entry,
                held=_held(folder, name, entry) if entry is not None else None,
                files=files,
                changes=changes,
            )
        )
    return tuple(work)


def _same_reading(entry: SourceEntry, settings: SourceSettings, source: FormatSource) -> bool:
    """Whether lengths of the catalog are true: the transform tells all of a tokenizer but its name."""
    if not settings.masks_bad_rows and any(file.num_bad_rows for file in entry.files):
        return False
    indexed = (entry.format, entry.column, entry.transform_id)
    return indexed == (settings.format, settings.column, source.transform_id)


def _held(folder: Path, name: str, entry: SourceEntry) -> SourceCatalog | None:
    """What the catalog holds of a source; None, with a message, if any of it is damaged."""
    try:
        check_content(folder / ARRAYS_FOLDER / entry.file, entry.arrays)
        return open_source(folder, name, entry)
    except CatalogError as error:
        logger.warning("source %r: %s - all is scanned", name, error)
        return None
