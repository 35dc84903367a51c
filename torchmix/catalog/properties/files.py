"""Properties on disk: one Arrow file for the rows of each data file, mapped where it is used.

In: tables of properties. Out: files in the catalog's folder `properties`, named by a hash of what they follow from, and
these tables again. Must hold: a file is whole or missing, and never altered, so a run that is killed loses at most the
one that it was writing. Cost: opening maps a file; nothing is read before it is used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pyarrow as pa

from torchmix.catalog.manifest import FileEntry, Manifest
from torchmix.errors import CatalogError

PROPERTIES_FOLDER = "properties"
SUFFIX = ".arrow"
UNFINISHED = ".tmp"


def identity_of(file: FileEntry) -> str:
    """What tells a data file from others: its size and hash, wherever it lies."""
    return f"{file.num_bytes}-{file.footer_hash}"


def name_of_table(source: str, *made_of: object) -> str:
    """The name of the file with a table that follows from `made_of`, plain values."""
    return f"{source}.{hashlib.sha256(msgspec.json.encode(made_of)).hexdigest()[:16]}{SUFFIX}"


def has_table(catalog_folder: Path, name: str, num_rows: int | None = None) -> bool:
    """Whether a file is there and whole, with so many rows."""
    try:
        table = open_table(catalog_folder, name)
    except CatalogError:
        return False
    return num_rows is None or len(table) == num_rows


def save_table(catalog_folder: Path, name: str, table: pa.Table) -> None:
    """Write a table, whole or not at all.

    Raises:
        OSError: The folder is not writable or the disk is full; nothing stays.
    """
    path = catalog_folder / PROPERTIES_FOLDER / name
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        descriptor = os.open(unfinished, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)  # before a manifest names it
        finally:
            os.close(descriptor)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def open_table(catalog_folder: Path, name: str) -> pa.Table:
    """A table, mapped.

    Raises:
        CatalogError: The file is missing or damaged.
    """
    path = catalog_folder / PROPERTIES_FOLDER / name
    try:
        with pa.memory_map(str(path)) as mapped:
            return pa.ipc.open_file(mapped).read_all()
    except (OSError, pa.ArrowException) as error:
        raise CatalogError(f"the catalog's file {path} is missing or damaged ({error}); run torchmix index") from None


def remove_tables(catalog_folder: Path, manifest: Manifest) -> None:
    """Remove the files that a manifest, just published, does not name; needs the catalog's lock."""
    folder = catalog_folder / PROPERTIES_FOLDER
    if not folder.is_dir():
        return
    named = set(_named(manifest))
    for path in folder.iterdir():
        if path.name not in named and path.name.endswith((SUFFIX, SUFFIX + UNFINISHED)):
            path.unlink(missing_ok=True)


def _named(manifest: Manifest) -> Iterable[str]:
    for entry in manifest.properties.values():
        yield from entry.files.values()
        for side in entry.side:
            yield side.table
            yield from side.files.values()
