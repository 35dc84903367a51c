"""Sources -> their catalog: find files, scan what is new, publish."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from torchmix.catalog.file_index import FileIndex, remove_file_indexes
from torchmix.catalog.in_store import address_of, catalog_folder, fetch_catalog, refresh
from torchmix.catalog.manifest import Manifest, SourceEntry, facts_of, read_manifest
from torchmix.catalog.properties import remove_tables
from torchmix.catalog.publish import SharedFile, catalog_lock, publish, remove_leftovers, with_settings, write_source
from torchmix.catalog.settings import SourceSettings, settings_of, settings_of_items
from torchmix.catalog.store import Catalog, SourceCatalog, WantedViews, open_catalog, open_manifest, open_part, views_of
from torchmix.errors import CatalogConflict, CatalogError, CatalogMissing, OptionError, SourceUnreadable
from torchmix.formats.documents import IndexedItems
from torchmix.formats.kept_ids import remove_stale
from torchmix.indexing.file_changes import FileChange, ProgressLines, check_files, log_costly_files
from torchmix.indexing.properties import WantedRows, denied_of, properties_and_views, wanted_rows
from torchmix.indexing.scan_files import Progress, ScannedFile, scan_files
from torchmix.indexing.source_work import SourceWork, ToScan, compare, files_to_scan, remove_stale_ids
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.parts import Part, with_all_sources
from torchmix.recipe.structs import Recipe

# --- Sources -> their catalog: find files, scan what is new, publish.
#
# Only new and changed files are scanned; a run that is killed loses at most the files it was scanning; the catalog
# that was there stays valid until the new one is whole; the result is the same whichever runs led to it, save that new
# files come after those known before. Other sources stay in the catalog. Cost: the footers of all files are read, the
# catalog's arrays are read once to check them, and the columns of new files are decoded.

logger = logging.getLogger(__name__)


class IndexReport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
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


def index_recipe(
    recipe: Recipe,
    directory: Path,
    *,
    progress: Progress | None = None,
    force: bool = False,
    any_rows: bool = False,
    keep_tokens: bool = False,
) -> Catalog:
    """Bring the catalog of a recipe up to date and open it; all of it as `update_catalog`."""
    report = index_sources(
        recipe, directory, progress=progress, force=force, any_rows=any_rows, keep_tokens=keep_tokens
    )
    return report.catalog


def index_sources(
    recipe: Recipe,
    directory: Path,
    *,
    progress: Progress | None = None,
    force: bool = False,
    any_rows: bool = False,
    keep_tokens: bool = False,
) -> IndexReport:
    """Bring the catalog of a recipe up to date; all of it as `update_catalog`."""
    return update_catalog(
        catalog_folder(directory, recipe.catalog),
        settings_of(recipe.sources, recipe.shuffle),
        directory,
        progress=progress,
        force=force,
        any_rows=any_rows,
        rows=wanted_rows(recipe),
        keep_tokens=keep_tokens,
    )


def update_catalog(
    folder: Path,
    settings: Mapping[str, SourceSettings],
    base: Path,
    *,
    progress: Progress | None = None,
    force: bool = False,
    any_rows: bool = False,
    rows: WantedRows | None = None,
    keep_tokens: bool = False,
) -> IndexReport:
    """Bring sources of a catalog up to date.

    Waits, with a log message, while another process does so.

    Args:
        folder: Where the catalog lies.
        settings: What to index, by name.
        base: The folder that paths of files are relative to.
        progress: Called while files are scanned.
        force: Scan every file again, and count rows in the sorted order of paths, as if there were no catalog.
        any_rows: The rows are not for training: a source may be empty, and lists may hold integers that are no token
            ids, such as labels of -100.
        rows: Properties and views that are wanted beside the sources; None leaves those that are there.
        keep_tokens: Keep the ids of all rows that are encoded, beside the sources whose recipe says so.

    Raises:
        RecipeError: A view keeps no rows, or its expression or property is wrong.
        SideTableError: A table of properties lacks the id of a row.
        DenyListError: A deny-list names a document that the sources do not have.
        SourceUnreadable: A file or column is missing, of a wrong type or format, a source holds no tokens, or a token
            is below 0 or above 2^31 - 1.
        SourceChanged: A file was altered while it was scanned.
        CorruptPage: A page does not decode.
        CatalogError: The catalog's folder or store cannot be written.
        CatalogConflict: Another process published to its store, again and again.
        OptionError: Ids are to be kept, and the catalog lies in a store.
    """
    if keep_tokens and (address := address_of(folder)) is not None:
        raise OptionError(f"the catalog is {address}, and ids are kept in folders alone; leave --keep-tokens out")
    with catalog_lock(folder):
        for is_last in (False, False, True):
            try:
                return _index(
                    folder,
                    settings,
                    base,
                    progress=progress,
                    force=force,
                    any_rows=any_rows,
                    rows=rows,
                    keep_tokens=keep_tokens,
                )
            except CatalogConflict as error:
                if is_last:
                    raise
                logger.warning("%s; it is read again, and what was scanned is used", error)
        raise AssertionError("the last attempt returns or raises")


def ensure_catalog(
    folder: Path, settings: Mapping[str, SourceSettings], base: Path, rows: WantedRows | None = None
) -> Catalog:
    """Open sources of a catalog; build it first if there is none, or none that has them all.

    If several processes find none, one of them builds it. The others wait, with a log message, and open it.

    Args:
        folder: Where the catalog lies.
        settings: What to open, by name.
        base: The folder that paths of files are relative to.
        rows: Properties and views that must be there, too; the returned catalog does not hold the views.

    Raises:
        CatalogStale: There is one, for other settings; `update_catalog` would bring it up to date.
        CatalogError: As `open_catalog` and `update_catalog`.
    """
    parts = () if rows is None else rows.parts
    catalog = catalog_if_any(folder, settings, *parts)
    if catalog is not None:
        return catalog
    where = "the catalog at %s is missing, or a source in it; indexing now"
    logger.warning(where, folder)
    with catalog_lock(folder):
        catalog = catalog_if_any(folder, settings, *parts)
        if catalog is None:
            lines = ProgressLines(logger.warning, only_long=True)
            catalog = _index(folder, settings, base, progress=lines, force=False, rows=rows).catalog
            lines.end()
    return catalog


def catalog_if_any(folder: Path, settings: Mapping[str, SourceSettings], *views: WantedViews) -> Catalog | None:
    """The catalog with the views of the last one of some parts, or None if it is missing, or lacks a view of any."""
    try:
        for of_part in views[:-1]:
            open_catalog(folder, settings, of_part)
        return open_catalog(folder, settings, views[-1] if views else None)
    except CatalogMissing:
        return None


def catalog_of_part(part: Part, whole: Recipe, folder: Path) -> Catalog:
    """The catalog of a part of a recipe that lies in a folder. Missing sources are indexed for all parts together,
    except where the catalog lies in a store: that is `CatalogMissing`."""
    place = fetch_catalog(folder, whole.catalog)
    catalog = catalog_if_any(place, settings_of(part.sources, part.shuffle), views_of(part))
    if catalog is None:
        if address_of(place) is None:  # else each host would index, since a store has no lock
            every = with_all_sources(whole)
            ensure_catalog(place, settings_of(every.sources, every.shuffle), folder, wanted_rows(every))
        catalog = open_part(place, part)
    return catalog


def _index(
    folder: Path,
    settings: Mapping[str, SourceSettings],
    base: Path,
    *,
    progress: Progress | None,
    force: bool,
    any_rows: bool = False,
    rows: WantedRows | None = None,
    keep_tokens: bool = False,
) -> IndexReport:
    """`update_catalog`, under the lock."""
    tables: IndexedItems | None = None
    if images := settings_of_items(settings):
        report = _index(folder, images, base, progress=progress, force=force, any_rows=True)
        tables = IndexedItems(report.catalog, base)
    old = _published(folder)
    manifest: Manifest | None = None
    try:
        _clean(folder)
        if force:
            remove_file_indexes(folder, frozenset(settings))
            # Items may lie in other files, which are measured again.
            remove_stale(folder, (), [name for name, source in settings.items() if source.items])
        work = compare(folder, settings, base, {} if force or old is None else old.sources, tables)
        files = files_to_scan(folder, work, ids_only=not any_rows, keep_tokens=keep_tokens)
        scanned = scan_files([one.task for one in files], base, progress)
        indexes = _files_of_sources(work, files, scanned)
        for source in work:
            check_files(source.name, source.settings, _named(source, indexes[source.name]), may_be_empty=any_rows)
        with closing(SharedFile(folder)) as shared:
            entries = {source.name: _entry(folder, source, indexes[source.name], shared) for source in work}
        properties, views, denied = None, None, None
        if rows is not None:
            properties, views = properties_and_views(
                folder, base, rows, {source.name: source.source for source in work}, entries, old
            )
            denied = denied_of(folder, base, rows, entries, properties, old)
        manifest = publish(folder, entries, old, properties=properties, views=views, denied=denied)
        remove_tables(folder, manifest)
        remove_file_indexes(folder, frozenset(settings))
        remove_stale_ids(folder, work)
    except OSError as error:
        raise CatalogError(f"cannot write the catalog at {folder}: {error}; mend that, then index again") from error
    finally:  # also after an error: unpublished files must not stay
        if manifest is None:
            _clean(folder)
        else:
            remove_leftovers(folder, manifest)
    catalog = open_manifest(folder, settings, manifest)  # nobody else publishes while we hold the lock
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
        refresh(folder)
        return read_manifest(folder)
    except CatalogMissing:
        return None
    except SourceUnreadable:  # the store, and not what it holds
        raise
    except CatalogError as error:
        what, _, _ = str(error).partition("; run torchmix index")
        logger.warning("%s; it is built again", what)
        return None


def _clean(folder: Path) -> None:
    """Remove unpublished files, unless the published manifest cannot be read."""
    try:
        remove_leftovers(folder, read_manifest(folder))
    except CatalogMissing:
        remove_leftovers(folder, None)
    except CatalogError:
        return  # of another version, or damaged: its arrays stay until ours are published


def _files_of_sources(
    work: Sequence[SourceWork], files: Sequence[ToScan], scanned: Sequence[ScannedFile]
) -> dict[str, list[FileIndex]]:
    """Parts of all files of each source, in the order of rows: just scanned, or held by the catalog."""
    new = {(one.source.name, one.file.found.path): done.index for one, done in zip(files, scanned, strict=True)}
    indexes: dict[str, list[FileIndex]] = {}
    for source in work:
        indexes[source.name] = []
        for file in source.files:
            index = new.get((source.name, file.found.path))
            if index is None:
                assert source.held is not None and file.entry is not None, "a file is held, or it was scanned"
                index = _held_file(source.held, file.entry)
            indexes[source.name].append(index)
    return indexes


def _entry(folder: Path, work: SourceWork, indexes: Sequence[FileIndex], shared: SharedFile) -> SourceEntry:
    """The catalog's entry of a source; its arrays are written, unless they are there already."""
    if work.entry is not None and work.held is not None and _is_unchanged(work, work.entry):
        files = tuple(
            msgspec.structs.replace(entry, path=file.found.path)
            for entry, file in zip(work.entry.files, work.files, strict=True)
        )
        return with_settings(work.entry, work.settings, files)
    named = _named(work, indexes)
    log_costly_files(work.name, named)
    entry = write_source(
        folder, work.name, work.settings, work.source.transform_id, named, shared, work.source.vocab_size
    )
    files = tuple(
        msgspec.structs.replace(written, status=file.found.status)
        for written, file in zip(entry.files, work.files, strict=True)
    )
    return msgspec.structs.replace(entry, files=files)


def _named(work: SourceWork, indexes: Sequence[FileIndex]) -> list[tuple[str, FileIndex]]:
    """The indexes of a source with the paths of their files."""
    return [(file.found.path, index) for file, index in zip(work.files, indexes, strict=True)]


def _is_unchanged(work: SourceWork, entry: SourceEntry) -> bool:
    return [file.entry for file in work.files] == list(range(len(entry.files)))


def _held_file(held: SourceCatalog, file: int) -> FileIndex:
    entry = held.files[file]
    start, stop = entry.first_row, entry.first_row + entry.num_rows
    return FileIndex(
        **facts_of(entry),
        schema=held.schemas[entry.schema],
        pages=held.pages.of_file(file),
        tokens=held.sizes.tokens[start:stop],
        sizes={name: column[start:stop] for name, column in held.sizes.columns.items()},
        items={kind: table.of_rows(start, stop) for kind, table in held.sizes.items.items()},
        marks={name: table.of_rows(start, stop) for name, table in held.sizes.marks.items()},
    )


# --- index: bring the catalog of a recipe up to date, as `torchmix index` does.


def index(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *,
    force: bool = False,
    keep_tokens: bool = False,
    directory: str | Path | None = None,
) -> Catalog:
    """Index the sources of all parts of a recipe, or bring their index up to date.

    Args:
        recipe: A YAML file, a `Recipe` or a mapping with its keys.
        force: Scan every file again.
        keep_tokens: Keep the ids of all rows that are tokenized or go through a map, so that reading makes none.
        directory: What paths in a `Recipe` are relative to; the current directory if not given.

    Returns:
        The catalog, opened.

    Raises:
        RecipeError: The recipe is wrong.
        CatalogError: A file is missing, unreadable or damaged, or the catalog's folder cannot be written.
    """
    checked, folder = recipe_and_directory("index", recipe, directory)
    return index_recipe(with_all_sources(checked), folder, force=force, keep_tokens=keep_tokens)
