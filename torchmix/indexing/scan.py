"""A recipe -> its catalog: find files, scan what is new, publish.

In: a recipe and its folder. Out: the catalog, opened. Must hold: only new and changed files are scanned; a run that is
killed loses at most the files it was scanning; the catalog that was there stays valid until the new one is whole; the
result is the same whichever runs led to it, save that new files come after those known before. Sources that the recipe
does not have stay in the catalog. Cost: the footers of all files are read, the catalog's arrays are read once to check
them, and the columns of new files are decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmix.catalog.array_files import check_content
from torchmix.catalog.lock import catalog_lock
from torchmix.catalog.manifest import Manifest, SourceEntry, read_manifest
from torchmix.catalog.parts import FilePart, part_path, remove_parts
from torchmix.catalog.publish import SharedArrays, publish, remove_leftovers, with_settings, write_source
from torchmix.catalog.store import (
    ARRAYS_FOLDER,
    Catalog,
    SourceCatalog,
    SourceSettings,
    catalog_directory,
    open_catalog,
    open_manifest,
    open_source,
    settings_of,
)
from torchmix.errors import CatalogError, CatalogMissing
from torchmix.formats.source import Source
from torchmix.formats.table import choose_source, find_source_files
from torchmix.indexing.file_changes import FileChange, WantedFile, match_files
from torchmix.indexing.log_lines import log_changes, log_costly_files
from torchmix.indexing.part_checks import check_parts
from torchmix.indexing.progress_lines import ProgressLines
from torchmix.indexing.scan_files import Progress, ScannedFile, ScanTask, fingerprint_files, scan_files
from torchmix.recipe.structs import Recipe
from torchmix.transform.open_tokenizer import Tokenizers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IndexReport:
    """What an index run did."""

    catalog: Catalog
    """The catalog, opened."""
    changes: tuple[FileChange, ...]
    """Files that differ from the catalog before."""
    scanned_files: int
    """Files that were scanned in this run."""
    resumed_files: int
    """Files whose scan by an earlier, unfinished run was used."""
    kept_files: int
    """Files that the catalog held already."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SourceWork:
    """One source of the recipe against the catalog before."""

    name: str
    settings: SourceSettings
    source: Source
    entry: SourceEntry | None
    """What the catalog says of it, if it was indexed for the same column and transform."""
    held: SourceCatalog | None
    """Its arrays, if they are whole."""
    files: tuple[WantedFile, ...]
    changes: tuple[FileChange, ...]


def index_recipe(
    recipe: Recipe,
    directory: Path,
    *,
    progress: Progress | None = None,
    force: bool = False,
    any_rows: bool = False,
) -> Catalog:
    """Bring the catalog of a recipe up to date and open it; all of it as `index_sources`."""
    return index_sources(recipe, directory, progress=progress, force=force, any_rows=any_rows).catalog


def index_sources(
    recipe: Recipe,
    directory: Path,
    *,
    progress: Progress | None = None,
    force: bool = False,
    any_rows: bool = False,
) -> IndexReport:
    """Bring the catalog of a recipe up to date.

    Waits, with a log message, while another process does so.

    Args:
        recipe: A checked recipe.
        directory: The recipe's folder.
        progress: Called while files are scanned.
        force: Scan every file again, and count rows in the sorted order of paths, as if there were no catalog.
        any_rows: They are not for training: a source may have none, and lists may hold integers that are no token ids,
            as labels of -100.

    Raises:
        SourceUnreadable: A file or column is missing, of a wrong type or format, a source holds no tokens, or a token
            is below 0 or above 2^31 - 1.
        SourceChanged: A file was altered while it was scanned.
        CorruptPage: A page does not decode.
        CatalogError: The catalog's folder cannot be written.
    """
    with catalog_lock(catalog_directory(recipe, directory)):
        return _index(recipe, directory, progress=progress, force=force, any_rows=any_rows)


def ensure_catalog(recipe: Recipe, directory: Path) -> Catalog:
    """Open the catalog of a recipe; build it first if there is none, or none that has all its sources.

    Of many processes that find none, one builds it. The others wait, with a log message, and open it.

    Args:
        recipe: A checked recipe.
        directory: The recipe's folder.

    Raises:
        CatalogStale: There is one, for other settings; `index_recipe` would bring it up to date.
        CatalogError: As `open_catalog` and `index_sources`.
    """
    try:
        return open_catalog(recipe, directory)
    except CatalogMissing as missing:
        logger.warning("%s; indexing now (or run `torchmix index` beforehand)", missing)
    with catalog_lock(catalog_directory(recipe, directory)):
        try:
            return open_catalog(recipe, directory)
        except CatalogMissing:
            lines = ProgressLines(logger.warning, only_long=True)
            report = _index(recipe, directory, progress=lines, force=False)
            lines.end()
            return report.catalog


def _index(
    recipe: Recipe, directory: Path, *, progress: Progress | None, force: bool, any_rows: bool = False
) -> IndexReport:
    """`index_sources`, under the lock."""
    folder = catalog_directory(recipe, directory)
    old = _published(folder)
    manifest: Manifest | None = None
    try:
        _clean(folder)
        if force:
            remove_parts(folder, frozenset(recipe.sources))
        work = _compare(recipe, directory, folder, {} if force or old is None else old.sources)
        scanned = scan_files(
            [_task(folder, *file, ids_only=not any_rows) for file in _to_scan(work)], directory, progress
        )
        parts = _parts_of_sources(work, scanned)
        for source in work:
            check_parts(source.name, source.settings, _named(source, parts[source.name]), may_be_empty=any_rows)
        with closing(SharedArrays(folder)) as shared:
            entries = {source.name: _entry(folder, source, parts[source.name], shared) for source in work}
        manifest = publish(folder, entries, old)
        remove_parts(folder, frozenset(recipe.sources))
    except OSError as error:
        raise CatalogError(f"cannot write the catalog at {folder}: {error}; mend that, then index again") from error
    finally:  # after an error, too: what was not published must not stay
        if manifest is None:
            _clean(folder)
        else:
            remove_leftovers(folder, manifest)
    catalog = open_manifest(recipe, folder, manifest)  # nobody else publishes while we hold the lock
    num_files = sum(len(source.files) for source in work)
    resumed = sum(file.resumed for file in scanned)
    return IndexReport(
        catalog=catalog,
        changes=tuple(change for source in work for change in source.changes),
        scanned_files=len(scanned) - resumed,
        resumed_files=resumed,
        kept_files=num_files - len(scanned),
    )


def _published(folder: Path) -> Manifest | None:
    """The manifest, or None if there is none that can be built upon."""
    try:
        return read_manifest(folder)
    except CatalogMissing:
        return None
    except CatalogError as error:
        logger.warning("%s - it is built anew", error)
        return None


def _clean(folder: Path) -> None:
    """Remove what is not published, unless what is published is not ours to judge."""
    try:
        remove_leftovers(folder, read_manifest(folder))
    except CatalogMissing:
        remove_leftovers(folder, None)
    except CatalogError:
        return  # of another version, or damaged: its arrays stay until ours are published


def _compare(
    recipe: Recipe, directory: Path, folder: Path, before: Mapping[str, SourceEntry]
) -> tuple[_SourceWork, ...]:
    names = sorted(recipe.sources)
    settings = {name: settings_of(recipe, name) for name in names}
    paths = {name: find_source_files(name, settings[name], directory) for name in names}
    tokenizers = Tokenizers(directory)
    sources = {name: choose_source(name, settings[name], paths[name], tokenizers) for name in names}
    found = iter(fingerprint_files([(sources[name], path) for name in names for path in paths[name]], directory))
    work: list[_SourceWork] = []
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
            _SourceWork(
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


def _same_reading(entry: SourceEntry, settings: SourceSettings, source: Source) -> bool:
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


def _task(folder: Path, work: _SourceWork, file: WantedFile, *, ids_only: bool) -> ScanTask:
    found = file.found
    identity = (found.path, found.num_bytes, found.footer_hash)
    masks_bad_rows = work.settings.masks_bad_rows
    reading = (work.settings.column or "", work.source.transform_id, masks_bad_rows)
    part = part_path(folder, work.name, identity, reading)
    return ScanTask(source=work.source, found=found, part=part, ids_only=ids_only, masks_bad_rows=masks_bad_rows)


def _to_scan(work: Sequence[_SourceWork]) -> list[tuple[_SourceWork, WantedFile]]:
    return [(source, file) for source in work for file in source.files if file.entry is None or source.held is None]


def _parts_of_sources(work: Sequence[_SourceWork], scanned: Sequence[ScannedFile]) -> dict[str, list[FilePart]]:
    """Parts of all files of each source, in the order of rows: just scanned, or held by the catalog."""
    new = {
        (source.name, file.found.path): done.part for (source, file), done in zip(_to_scan(work), scanned, strict=True)
    }
    parts: dict[str, list[FilePart]] = {}
    for source in work:
        parts[source.name] = []
        for file in source.files:
            part = new.get((source.name, file.found.path))
            if part is None:
                assert source.held is not None and file.entry is not None, "a file is held, or it was scanned"
                part = _held_part(source.held, file.entry)
            parts[source.name].append(part)
    return parts


def _entry(folder: Path, work: _SourceWork, parts: Sequence[FilePart], shared: SharedArrays) -> SourceEntry:
    """The catalog's entry of a source; its arrays are written, unless they are there already."""
    if work.entry is not None and work.held is not None and _is_unchanged(work, work.entry):
        files = tuple(
            msgspec.structs.replace(entry, path=file.found.path)
            for entry, file in zip(work.entry.files, work.files, strict=True)
        )
        return with_settings(work.entry, work.settings, files)
    named = _named(work, parts)
    log_costly_files(work.name, named)
    entry = write_source(
        folder, work.name, work.settings, work.source.transform_id, named, shared, work.source.vocab_size
    )
    files = tuple(
        msgspec.structs.replace(written, status=file.found.status)
        for written, file in zip(entry.files, work.files, strict=True)
    )
    return msgspec.structs.replace(entry, files=files)


def _named(work: _SourceWork, parts: Sequence[FilePart]) -> list[tuple[str, FilePart]]:
    """The parts of a source with the paths of their files."""
    return [(file.found.path, part) for file, part in zip(work.files, parts, strict=True)]


def _is_unchanged(work: _SourceWork, entry: SourceEntry) -> bool:
    return [file.entry for file in work.files] == list(range(len(entry.files)))


def _held_part(held: SourceCatalog, file: int) -> FilePart:
    entry = held.files[file]
    return FilePart(
        num_bytes=entry.num_bytes,
        footer_hash=entry.footer_hash,
        split_pages=entry.split_pages,
        whole_chunks=entry.whole_chunks,
        schema=held.schemas[entry.schema],
        pages=held.pages.of_file(file),
        tokens=held.sizes.tokens[entry.first_row : entry.first_row + entry.num_rows],
        ids=entry.ids,
        num_bad_rows=entry.num_bad_rows,
        bad_rows=entry.bad_rows,
    )
