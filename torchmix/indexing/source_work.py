"""Sources as they are to be, against the catalog before -> the files to scan, and those of one shard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchmix.catalog.array_files import check_content
from torchmix.catalog.file_index import file_index_path
from torchmix.catalog.in_store import address_of, bring
from torchmix.catalog.manifest import SourceEntry, read_manifest
from torchmix.catalog.publish import catalog_lock
from torchmix.catalog.settings import SourceSettings
from torchmix.catalog.store import ARRAYS_FOLDER, SourceCatalog, open_source
from torchmix.errors import CatalogError, OptionError, RecipeError, SourceUnreadable
from torchmix.formats.documents import IndexedItems, LaidOutTexts
from torchmix.formats.kept_ids import identity_of, kept_path, read_kept, remove_stale
from torchmix.formats.source import FormatSource
from torchmix.formats.table import choose_source, find_source_files
from torchmix.indexing.file_changes import FileChange, WantedFile, log_changes, match_files
from torchmix.indexing.scan_files import Progress, ScanTask, fingerprint_files, scan_files
from torchmix.transform.maps import MapEncoder, open_maps
from torchmix.transform.open_tokenizer import Tokenizers

# --- Sources as they are to be, against the catalog before.
#
# Kept files were read as they would be read now; their arrays are whole. Cost: the footers of all files, and one read
# of the catalog's arrays.

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
    tables: IndexedItems | None = None,
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
        bring(folder, [f"{ARRAYS_FOLDER}/{entry.file}"])
        check_content(folder / ARRAYS_FOLDER / entry.file, entry.arrays)
        return open_source(folder, name, entry)
    except SourceUnreadable:  # the store of the catalog, and not what it holds
        raise
    except CatalogError as error:
        logger.warning("source %r: %s - all is scanned", name, error)
        return None


# --- Sources against the catalog before -> the files to scan, and those of one shard of several.
#
# The same sources and catalog give the same tasks and the same shards on every machine; each task is of one shard.
# Cost: the end of each file of ids where ids are kept.


class Shard(NamedTuple):
    """One of several runs that scan files together."""

    number: int
    """From 1 to `of`."""
    of: int


class ToScan(NamedTuple):
    """A file to scan."""

    source: SourceWork
    file: WantedFile
    task: ScanTask


def files_to_scan(folder: Path, work: Sequence[SourceWork], *, ids_only: bool, keep_tokens: bool) -> list[ToScan]:
    """The files that a run must scan.

    Args:
        folder: The catalog's.
        work: Its sources.
        ids_only: Whether integers that are no token ids are an error.
        keep_tokens: Whether ids are kept of all sources whose rows are encoded; else of those whose recipe says so.

    Raises:
        RecipeError: Ids of a random map are to be kept.
    """
    found: list[ToScan] = []
    for source in work:
        keeps = _keeps_ids(source, keep_tokens=keep_tokens)
        for file in source.files:
            task = _task(folder, source, file, ids_only=ids_only, keeps_ids=keeps)
            is_new = file.entry is None or source.held is None
            if is_new or (task.kept is not None and read_kept(task.kept, _identity(source, file)) is None):
                found.append(ToScan(source, file, task))
    return found


def of_shard(files: Sequence[ToScan], shard: Shard) -> list[ToScan]:
    """The files of one shard: the largest first, each is given to the shard that has the fewest bytes."""
    num_bytes = [0] * shard.of
    mine: list[ToScan] = []
    for one in sorted(files, key=lambda one: (-one.file.found.num_bytes, one.source.name, one.file.found.path)):
        least = num_bytes.index(min(num_bytes))
        num_bytes[least] += one.file.found.num_bytes
        if least == shard.number - 1:
            mine.append(one)
    return mine


def remove_stale_ids(folder: Path, work: Sequence[SourceWork]) -> None:
    """Remove ids of files and transforms that these sources no longer have."""
    current = [path for source in work for path in _kept_paths(folder, source)]
    remove_stale(folder, current, [source.name for source in work])


def _kept_paths(folder: Path, source: SourceWork) -> Iterator[Path]:
    for file in source.files:
        yield kept_path(folder, source.name, _identity(source, file))


def _keeps_ids(source: SourceWork, *, keep_tokens: bool) -> bool:
    read = source.source
    is_laid_out = isinstance(read, LaidOutTexts)
    encoder = read.map if isinstance(read, LaidOutTexts) else read.row_encoder
    if not (is_laid_out or encoder is not None) or not (keep_tokens or source.settings.keeps_tokens):
        return False
    if isinstance(encoder, MapEncoder) and encoder.map.is_random:
        if not source.settings.keeps_tokens:
            return False  # all sources were meant for which it can be
        raise RecipeError(
            f"the map {encoder.map.words} is random, so a row has other ids in each epoch; remove the key",
            f"sources.{source.name}.keep",
        )
    return True


def _identity(source: SourceWork, file: WantedFile) -> tuple[int, str, str, str]:
    found = file.found
    return identity_of(found.num_bytes, found.footer_hash, source.settings.column, source.source.transform_id)


def _task(folder: Path, source: SourceWork, file: WantedFile, *, ids_only: bool, keeps_ids: bool) -> ScanTask:
    found, settings = file.found, source.settings
    identity = (found.path, found.num_bytes, found.footer_hash)
    reading = (settings.column or "", source.source.transform_id, settings.masks_bad_rows)
    return ScanTask(
        source=source.source,
        found=found,
        index=file_index_path(folder, source.name, identity, reading),
        column=settings.column,
        ids_only=ids_only,
        masks_bad_rows=settings.masks_bad_rows,
        kept=kept_path(folder, source.name, _identity(source, file)) if keeps_ids else None,
    )


# --- One shard of the files of sources -> their indexes, for a later index run to publish.
#
# Cost: the footers of all files, and the columns of the shard's.


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one shard did."""

    files_of_shard: int
    """Files of the shard."""
    files_in_all: int
    """Files that all shards scan together."""
    resumed_files: int
    """Files of the shard that had been scanned before."""


def scan_shard(
    catalog_folder: Path,
    settings: Mapping[str, SourceSettings],
    base: Path,
    shard: Shard,
    *,
    progress: Progress | None = None,
    keep_tokens: bool = False,
) -> ShardReport:
    """Scan the files of a shard; arguments and errors as those of `scan.update_catalog`.

    Raises:
        OptionError: The catalog lies in a store.
    """
    if (address := address_of(catalog_folder)) is not None:
        raise OptionError(
            f"the catalog is {address}, and shards meet in a folder that all machines see; name such a folder in the "
            "recipe's catalog key, or run torchmix index on one machine"
        )
    with catalog_lock(catalog_folder, is_shared=True):
        try:
            sources = read_manifest(catalog_folder).sources
        except CatalogError:
            sources = {}
        try:
            work = compare(catalog_folder, settings, base, sources)
            files = files_to_scan(catalog_folder, work, ids_only=True, keep_tokens=keep_tokens)
            mine = of_shard(files, shard)
            scanned = scan_files([one.task for one in mine], base, progress)
        except OSError as error:
            raise CatalogError(
                f"cannot write the catalog at {catalog_folder}: {error}; mend that, then index again"
            ) from error
    return ShardReport(
        files_of_shard=len(mine), files_in_all=len(files), resumed_files=sum(file.resumed for file in scanned)
    )
