"""Manifests that runs had, kept beside the present one, so that a run's earlier steps can be planned after an edit.

In: a manifest, and the sources and views of a run. Out: a file in the catalog's `history`, named by its content; and
the manifest again. Must hold: a file appears whole or not at all and is never altered; what it names stays in `arrays`
while it is there. Cost: about 200 bytes of JSON per data file, once for runs of equal manifests.

Runs write without the catalog's lock: what a run has opened is in the present manifest or the one before, so an index
run keeps the arrays until the file is there.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from torchmix.catalog.manifest import Manifest, flush_folder
from torchmix.errors import HistoryMissing

HISTORY_FOLDER = "history"
MANIFEST_SUFFIX = ".manifest.json"
_MANIFEST = msgspec.json.Decoder(Manifest)


def manifest_of_run(manifest: Manifest, *, part: str, sources: Collection[str]) -> bytes:
    """What a run has of a manifest, as JSON: its sources, their views and denied rows, and what decides their order."""
    entries = {}
    for name in sorted(sources):
        entry = manifest.sources[name]
        files = tuple(msgspec.structs.replace(file, status=()) for file in entry.files)
        entries[name] = msgspec.structs.replace(entry, files=files)
    denied = {name: one for name, one in manifest.denied.items() if name in entries}
    views = {name: view for name, view in manifest.views.get(part, {}).items() if view.source in entries}
    kept = msgspec.structs.replace(
        manifest,
        sources=entries,
        superseded=(),
        properties={},
        views={part: views} if views else {},
        denied=denied,
        earlier_views={},
    )
    return msgspec.json.format(msgspec.json.encode(kept), indent=1)


def keep_file(catalog_folder: Path, content: bytes, suffix: str) -> str:
    """Keep a content in `history`; the 16 hex digits of its name.

    Raises:
        OSError: The folder is not writable or the disk is full.
    """
    folder = catalog_folder / HISTORY_FOLDER
    path = folder / f"{name_of(content)}{suffix}"
    if path.exists():
        return name_of(content)
    folder.mkdir(exist_ok=True)
    aside = folder / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    flush_folder(folder)
    return name_of(content)


def kept_file(catalog_folder: Path, name: str, suffix: str) -> bytes:
    """A content that was kept.

    Raises:
        HistoryMissing: The file is gone, or is another one.
    """
    path = catalog_folder / HISTORY_FOLDER / f"{name}{suffix}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HistoryMissing(
            f"{path}: {error.strerror}. The history of the run is not whole; bring the file back"
        ) from None
    if name_of(content) != name:
        raise HistoryMissing(
            f"{path} was altered: its name is a hash of its content; bring the file back, or remove it"
        )
    return content


def kept_manifest(catalog_folder: Path, name: str) -> Manifest:
    """A manifest that was kept; errors as `kept_file`."""
    content = kept_file(catalog_folder, name, MANIFEST_SUFFIX)
    try:
        return _MANIFEST.decode(content)
    except msgspec.MsgspecError as error:
        path = catalog_folder / HISTORY_FOLDER / f"{name}{MANIFEST_SUFFIX}"
        raise HistoryMissing(f"{path} is of another version of torchmix ({error}); remove it") from None


def kept_manifests(catalog_folder: Path) -> Iterator[Manifest]:
    """All manifests that were kept; errors as `kept_file`."""
    for path in sorted((catalog_folder / HISTORY_FOLDER).glob(f"*{MANIFEST_SUFFIX}")):
        yield kept_manifest(catalog_folder, path.name.removesuffix(MANIFEST_SUFFIX))


def name_of(content: bytes) -> str:
    """16 hex digits over a content."""
    return hashlib.sha256(content).hexdigest()[:16]
