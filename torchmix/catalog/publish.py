"""Writing the catalog: arrays in fresh files, then the manifest in one step."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.array_files import SMALL_BYTES, ArrayEntry, ArrayWriter, flush_files, write_arrays
from torchmix.catalog.file_index import FileIndex, remove_file_indexes
from torchmix.catalog.in_store import address_of, publish_copy, refresh_history
from torchmix.catalog.manifest import (
    CATALOG_VERSION,
    NEW_MANIFEST_NAME,
    DeniedEntry,
    FileEntry,
    Manifest,
    PropertiesEntry,
    SourceEntry,
    ViewEntry,
    encode_manifest,
    facts_of,
    flush_folder,
    kept_manifests,
    manifest_in,
    source_fingerprint,
    write_manifest,
)
from torchmix.catalog.page_table import join_tables
from torchmix.catalog.properties import PROPERTIES_FOLDER, tables_of
from torchmix.catalog.settings import SourceSettings
from torchmix.catalog.sizes import joined_arrays, named_arrays
from torchmix.catalog.store import ARRAYS_FOLDER, ROWS, SourceCatalog
from torchmix.errors import CatalogError, HistoryMissing
from torchmix.recipe.items import kept_words

# --- One writer of a catalog at a time, over processes and, where the file system supports it, over nodes.
#
# The lock ends with the process, however it ends, so a killed job leaves nothing to clean. Readers take no lock: they
# see the last catalog that was published. Cost: one system call where nobody else holds it.

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"


@contextmanager
def catalog_lock(directory: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Hold the catalog's lock; waits, with one log message, while another process or thread holds it.

    Args:
        directory: The catalog's folder; it is made, with its parents, if it is missing.
        is_shared: Others may hold the lock, too, who share it: they write files that only they know, and publish none.

    Raises:
        CatalogError: The folder cannot be made or written, or its file system has no locks.
    """
    path = directory / LOCK_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CatalogError(
            f"cannot write the catalog folder {directory}: {error.strerror}; name a writable one in the recipe's "
            "catalog key"
        ) from error
    try:
        _take(descriptor, path, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        # Names the holder to waiting processes. It outlives the holder, so nothing relies on it.
        with suppress(OSError):  # a full disk is named by what needs more of it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)  # also releases the lock


def _take(descriptor: int, path: Path, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise CatalogError(
                f"cannot lock {path}: {error.strerror}; put the catalog on a file system with flock"
            ) from error
    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
    logger.warning("waiting for %s, which is writing the catalog %s", holder, path.parent)
    fcntl.flock(descriptor, kind)


# --- Denied rows -> their entries in the catalog, with arrays on disk.
#
# An entry is of one set of lists with their bytes, and of one set of files. Cost: 8 bytes a denied row.


def denied_entry(folder: Path, source: SourceCatalog, rows: Int64Array, lists: Mapping[str, str]) -> DeniedEntry:
    """Write the denied rows of a source, and describe them.

    Args:
        folder: The catalog's folder, locked by the caller.
        source: The source, as it is to be published.
        rows: [n] ascending, each once.
        lists: Path of each deny-list to the hash of its bytes.

    Raises:
        OSError: The disk is full, or not writable.
    """
    name: str | None = None
    arrays: dict[str, ArrayEntry] = {}
    if len(rows):
        path = folder / ARRAYS_FOLDER / f"{source.name}.{secrets.token_hex(4)}"
        path.parent.mkdir(exist_ok=True)
        name, arrays = path.name, write_arrays(path, {ROWS: [rows]})
    return DeniedEntry(
        lists=dict(sorted(lists.items())),
        source_fingerprint=source.fingerprint,
        fingerprint=hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16] if len(rows) else "",
        num_documents=len(rows),
        num_tokens=int(np.asarray(source.sizes.tokens[rows]).sum(dtype=np.int64)),
        file=name,
        arrays=arrays,
    )


# --- Publishing.
#
# A crash, a full disk or a kill at any point leaves the previous catalog valid; the next run removes what such a run
# left. All of it runs under the catalog's lock. Cost: the arrays of each changed source are written once, unchanged
# arrays are kept.
#
#     catalog/
#         manifest.json                the only name that readers start from
#         arrays/<source>.<8 hex>      arrays of one index of one source, never altered
#         arrays/sources.<8 hex>       likewise, of small sources that were indexed together
#         files/                       files scanned by a run that has not been published
#         history/                     manifests of training runs, whose arrays stay
#         .lock

SHARED_NAME = "sources"
KEPT_VIEWS = 8
"""Versions of a view that are kept once it has other rows."""
ARRAYS_NAME = re.compile(r".+\.[0-9a-f]{8}")


class SharedFile:
    """One file for the arrays of small sources that are indexed together. Making hundreds of files and flushing each to
    the disk takes longer than scanning these sources. The file is made when it is first needed; close it."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the catalog's folder, locked by the caller."""
        self._path = directory / ARRAYS_FOLDER / f"{SHARED_NAME}.{secrets.token_hex(4)}"
        self._writer: ArrayWriter | None = None

    def add(self, arrays: Mapping[str, Sequence[NDArray[Any]]]) -> tuple[str, dict[str, ArrayEntry]]:
        """Write arrays; return the file's name, and their entries. `OSError` if the disk is full or not writable."""
        if self._writer is None:
            self._path.parent.mkdir(exist_ok=True)
            self._writer = ArrayWriter(self._path)
        return self._path.name, self._writer.add(arrays)

    def close(self) -> None:
        """Hand the added arrays to the kernel; `OSError` if they do not fit."""
        if self._writer is not None:
            self._writer.close()


def write_source(
    directory: Path,
    name: str,
    settings: SourceSettings,
    transform_id: str,
    files: Sequence[tuple[str, FileIndex]],
    shared: SharedFile | None = None,
    vocab_size: int | None = None,
) -> SourceEntry:
    """Write the arrays of one source into a fresh file, or a shared one, and describe them; `publish` flushes them to
    the disk.

    Args:
        directory: The catalog's folder, locked by the caller.
        name: The source.
        settings: Its settings in the recipe.
        transform_id: Version of the transform from rows to tokens.
        files: Path and index of each file, in the order in which rows are to be counted; at least one page in all.
        shared: File for small arrays; by default every source has a file of its own.
        vocab_size: Size of the tokenizer's vocabulary; None where the files hold ids.

    Raises:
        CatalogError: An index breaks an invariant.
        OSError: The disk is full, or not writable; the unfinished file is removed.
    """
    pages = join_tables([index.pages for _, index in files])
    if len(files) > 1:  # an index has been checked by itself
        pages.check()
    lengths = [index.tokens for _, index in files if len(index.tokens)]
    num_tokens = sum(int(tokens.sum(dtype=np.int64)) for tokens in lengths)
    window_pages = settings.window_pages(num_pages=pages.num_pages, num_tokens=num_tokens)
    schemas = tuple(dict.fromkeys(index.schema for _, index in files))
    entries = _file_entries(files, schemas)
    arrays_by_name: dict[str, Sequence[NDArray[Any]]] = {key: [array] for key, array in pages.arrays()}
    arrays_by_name["tokens"] = [index.tokens for _, index in files]
    # What a file without rows holds is not known from it, as whether its messages are structs.
    with_rows = [index for _, index in files if len(index.tokens)] or [index for _, index in files[:1]]
    arrays_by_name |= joined_arrays([named_arrays(index.sizes, index.items, index.marks) for index in with_rows])
    if (
        shared is not None
        and sum(array.nbytes for of_name in arrays_by_name.values() for array in of_name) <= SMALL_BYTES
    ):
        file, arrays = shared.add(arrays_by_name)
    else:
        file, arrays = _write_own(directory, name, arrays_by_name)
    return SourceEntry(
        **settings.words(),
        patterns=settings.patterns,
        items=kept_words(settings.items),
        transform_id=transform_id,
        vocab_size=vocab_size,
        fingerprint=source_fingerprint(entries, settings.column, transform_id, window_pages),
        window_pages=window_pages,
        num_documents=pages.num_rows,
        num_tokens=num_tokens,
        num_empty=sum(int((tokens == 0).sum()) for tokens in lengths),
        max_document_tokens=max((int(tokens.max()) for tokens in lengths), default=0),
        file=file,
        arrays=arrays,
        schemas=schemas,
        files=entries,
    )


def _write_own(
    directory: Path, name: str, arrays_by_name: Mapping[str, Sequence[NDArray[Any]]]
) -> tuple[str, dict[str, ArrayEntry]]:
    path = directory / ARRAYS_FOLDER / f"{name}.{secrets.token_hex(4)}"
    path.parent.mkdir(exist_ok=True)
    try:
        return path.name, write_arrays(path, arrays_by_name)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _file_entries(files: Sequence[tuple[str, FileIndex]], schemas: tuple[bytes, ...]) -> tuple[FileEntry, ...]:
    entries: list[FileEntry] = []
    first_row = 0
    for path, index in files:
        entry = FileEntry(
            **facts_of(index),
            path=path,
            first_row=first_row,
            num_rows=index.pages.num_rows,
            num_pages=index.pages.num_pages,
            tail_bytes=int(index.pages.tail_bytes.sum(dtype=np.int64)),
            schema=schemas.index(index.schema),
        )
        entries.append(entry)
        first_row += entry.num_rows
    return tuple(entries)


def with_settings(entry: SourceEntry, settings: SourceSettings, files: tuple[FileEntry, ...]) -> SourceEntry:
    """The entry of a source whose arrays stay, with new patterns, another window or new names of its files.

    The tokenizer stays too, but the recipe may give it another name.
    """
    window_pages = settings.window_pages(num_pages=sum(file.num_pages for file in files), num_tokens=entry.num_tokens)
    return msgspec.structs.replace(
        entry,
        **settings.words(),
        patterns=settings.patterns,
        items=kept_words(settings.items),
        window_pages=window_pages,
        files=files,
        fingerprint=source_fingerprint(files, entry.column, entry.transform_id, window_pages),
    )


def publish(
    directory: Path,
    entries: Mapping[str, SourceEntry],
    old: Manifest | None,
    *,
    properties: Mapping[str, PropertiesEntry] | None = None,
    views: Mapping[str, Mapping[str, ViewEntry]] | None = None,
    denied: Mapping[str, DeniedEntry] | None = None,
) -> Manifest:
    """Publish sources of the catalog, in one step.

    Args:
        directory: The catalog's folder, locked by the caller.
        entries: The sources to add or replace; their arrays are written.
        old: What was published before; its other sources stay.
        properties: All that is kept of properties, their files written; None: as before.
        views: All views, their arrays written; None: as before.
        denied: All denied rows, their arrays written; None: as before.

    Returns:
        The published manifest; `old` itself if `entries` alter nothing, and then nothing is written.

    Raises:
        OSError: The disk is full, or not writable; `old` stays published.
        CatalogConflict: The catalog lies in a store, and is no longer `old` there.
        CatalogError: That store does not take it.
    """
    sources = {**(old.sources if old else {}), **entries}
    sources = {name: sources[name] for name in sorted(sources)}
    manifest = Manifest(
        version=CATALOG_VERSION,
        sources=sources,
        superseded=() if old is None else old.superseded,
        properties=dict(properties if properties is not None else old.properties if old else {}),
        views={part: dict(of) for part, of in (views if views is not None else old.views if old else {}).items()},
        earlier_views=_earlier_views(views, old),
        denied=dict(denied if denied is not None else old.denied if old else {}),
    )
    if old is not None and manifest == old:
        _publish_copy(directory, old, old)  # what its store has lost is put there again
        return old
    used, published = _array_files(manifest), _array_files(old) if old else set()
    superseded = published - used
    folder = directory / ARRAYS_FOLDER
    fresh = [folder / place for place in sorted(used - published)]
    try:  # files that a manifest names reach the disk before the manifest
        flush_files(fresh)
        flush_folder(folder)
    except BaseException:
        for path in fresh:
            path.unlink(missing_ok=True)
        raise
    manifest = msgspec.structs.replace(manifest, superseded=tuple(sorted(superseded)))
    _publish_copy(directory, manifest, old)
    write_manifest(directory, manifest)
    return manifest


def _publish_copy(directory: Path, manifest: Manifest, old: Manifest | None) -> None:
    """Publish to the store of the catalog, if the folder is a copy of one."""
    if address_of(directory) is None:
        return
    refresh_history(directory)
    files, is_pruned = {*manifest.superseded, *_array_files(manifest)}, True
    try:
        files = files.union(*map(_array_files, kept_manifests(directory)))
    except HistoryMissing as error:
        logger.warning("%s; until then no object of an earlier catalog is removed", error)
        is_pruned = False
    names = {f"{ARRAYS_FOLDER}/{file}" for file in files}
    names |= {f"{PROPERTIES_FOLDER}/{file}" for file in tables_of(manifest)}

    publish_copy(
        directory,
        encode_manifest(manifest),
        names,
        is_base=lambda content: manifest_in(content) == old,
        is_pruned=is_pruned,
    )


def _array_files(manifest: Manifest) -> set[str]:
    """The files of `arrays` that a manifest is made of, without those of the one before."""
    views = [view.file for of_part in manifest.views.values() for view in of_part.values() if view.file is not None]
    denied = [entry.file for entry in manifest.denied.values() if entry.file is not None]
    of_parts = manifest.earlier_views.values()
    earlier = [one.file for of_part in of_parts for entries in of_part.values() for one in entries if one.file]
    return {*(entry.file for entry in manifest.sources.values()), *views, *earlier, *denied}


def _earlier_views(
    views: Mapping[str, Mapping[str, ViewEntry]] | None, old: Manifest | None
) -> dict[str, dict[str, tuple[ViewEntry, ...]]]:
    """Views that were replaced: those of before, and before them those that were kept then."""
    if old is None or views is None:
        return {} if old is None else dict(old.earlier_views)
    found = {part: dict(of_part) for part, of_part in old.earlier_views.items()}
    for part, of_part in old.views.items():
        for name, entry in of_part.items():
            now = views.get(part, {}).get(name)
            if entry.file is None or (now is not None and now.fingerprint == entry.fingerprint):
                continue
            kept = [one for one in found.get(part, {}).get(name, ()) if one.fingerprint != entry.fingerprint]
            found.setdefault(part, {})[name] = (entry, *kept[: KEPT_VIEWS - 1])
    return {part: dict(sorted(found[part].items())) for part in sorted(found)}


def remove_leftovers(directory: Path, manifest: Manifest | None) -> None:
    """Remove what a killed run left: every file of the catalog that neither `manifest` nor the history of a run names.

    Indexes of files stay: `remove_file_indexes` is for them. Needs the catalog's lock.
    """
    (directory / NEW_MANIFEST_NAME).unlink(missing_ok=True)
    remove_file_indexes(directory, None)
    named = {*manifest.superseded, *_array_files(manifest)} if manifest else set()
    try:
        named = named.union(*map(_array_files, kept_manifests(directory)))
    except HistoryMissing as error:
        logger.warning("%s; until then no array of an earlier catalog is removed", error)
        return
    folder = directory / ARRAYS_FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in named and ARRAYS_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)
