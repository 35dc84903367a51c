"""The manifest: all that a catalog knows except its arrays, as one JSON file that a person can read."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from torchmix.catalog.array_files import ArrayEntry, write_whole
from torchmix.catalog.in_store import MANIFEST_NAME, catalog_place, put_file
from torchmix.catalog.settings import SourceWords
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale, HistoryMissing, TooManyBadRows
from torchmix.recipe.fingerprint import digest_of
from torchmix.storage.random_access import FileStatus

# --- Rows that could not be read when their file was indexed: how many, the first few with what was wrong, and the
# bound.
#
# A catalog whose source has more bad rows than its recipe allows is neither published nor opened. Cost: 8 bytes a bad
# row while its file is scanned, and some 100 bytes in the catalog for each listed row.

MOST_LISTED = 10
"""Most bad rows of a file that are listed; the others are only counted."""
MOST_REASON = 200
"""Most characters of a reason."""


class BadRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """A row that could not be read; a list in JSON."""

    row: int
    """Row of the file, from 0."""
    reason: str


class BadRows:
    """The bad rows of one file, as a scan meets them."""

    def __init__(self) -> None:
        self.rows = array("q")
        """Row in the file of each bad row."""
        self._listed: list[BadRow] = []

    def add(self, row: int, reason: str) -> None:
        """Add a bad row. The same row twice in succession is one row, in which the scan met another bad part."""
        if self.rows and self.rows[-1] == row:
            return
        self.rows.append(row)
        if len(self._listed) < MOST_LISTED:
            self._listed.append(BadRow(row=row, reason=reason[:MOST_REASON]))

    def extend(self, others: BadRows) -> None:
        """Add bad rows that were collected separately."""
        self.rows.extend(others.rows)
        self._listed += others._listed[: MOST_LISTED - len(self._listed)]

    @property
    def listed(self) -> tuple[BadRow, ...]:
        """The first ones, at most MOST_LISTED."""
        return tuple(sorted(self._listed))


class IndexedFile(Protocol):
    """What the check needs to know of an indexed file."""

    @property
    def num_bad_rows(self) -> int:
        """Rows that could not be read."""

    @property
    def bad_rows(self) -> tuple[BadRow, ...]:
        """The first of these rows."""


def listed_text(files: Sequence[tuple[str, IndexedFile]], most: int) -> str:
    """The first bad rows of files, as `PATH row 5: reason; PATH row 9: reason`; `files` with their paths."""
    listed = [f"{path} row {bad.row}: {bad.reason}" for path, file in files for bad in file.bad_rows]
    more = sum(file.num_bad_rows for _, file in files) - len(listed[:most])
    return "; ".join(listed[:most]) + (f"; and {more} more" if more else "")


def check_bad_rows(
    name: str,
    files: Sequence[tuple[str, IndexedFile]],
    *,
    num_rows: int,
    is_masked: bool,
    max_bad: Fraction,
    is_fresh: bool = False,
) -> None:
    """Refuse a source with bad rows that its recipe does not allow.

    Args:
        name: The source.
        files: Its files, with their paths.
        num_rows: Rows of all of them, bad ones included.
        is_masked: Whether the recipe masks bad rows.
        max_bad: Part of all rows that may be bad.
        is_fresh: Whether the files were indexed just now.

    Raises:
        CatalogStale: Bad rows are an error now, but were masked when the source was indexed.
        TooManyBadRows: More rows are bad than `max_bad` allows.
    """
    num_bad = sum(file.num_bad_rows for _, file in files)
    if not num_bad:
        return
    fact = f"source {name!r}: {num_bad} of {num_rows} rows {'cannot be read' if is_fresh else 'could not be indexed'}"
    if not is_masked:
        raise CatalogStale(
            f"{fact} ({listed_text(files, 1)}), and they are an error now; write bad_rows: mask, or mend them and "
            "run torchmix index"
        )
    if num_bad > max_bad * num_rows:
        raise TooManyBadRows(
            f"{fact}, which is {num_bad / num_rows:.4%}, and max_bad is {float(max_bad):.4%}: {listed_text(files, 3)}. "
            "Mend them and run torchmix index, or raise max_bad"
        )


# --- The records of a manifest, and how it is read and replaced.
#
# All files that the manifest names are on disk before the manifest is. So replacing this one file publishes a catalog,
# and a crash before that publishes nothing. Cost: about 200 bytes of JSON per data file.

CATALOG_VERSION = 1
NEW_MANIFEST_NAME = "manifest.json.new"


MOST_ID = 2**31 - 1
"""Ids travel in 32 bits, and no model has more."""


class IdRange(NamedTuple):
    """The smallest and the largest token id of something; a list in JSON."""

    smallest: int
    largest: int


class ListBytes(NamedTuple):
    """Most bytes of the lists that a map gives beside ids, as a step holds them; a list in JSON."""

    of_row: int
    """The most of one row."""
    of_token: int
    """The most of one row over its tokens, rounded up."""


def most_lists(seen: Iterable[ListBytes | None]) -> ListBytes | None:
    """The most of all parts of a source, or of several sources."""
    found = [one for one in seen if one is not None]
    return ListBytes(max(one.of_row for one in found), max(one.of_token for one in found)) if found else None


class FileFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What its index and the manifest say of one data file, each beside more."""

    num_bytes: int
    """Size; with `footer_hash` the file's identity. Modification times do not count: they differ between nodes."""
    footer_hash: str
    """Hash of the bytes at its end that describe the rest."""
    split_pages: int
    """Number of the writer's pages that begin inside a row; their beginning is read with the page before, too."""
    whole_chunks: bool
    """Whether some page is a whole large chunk, because the format allows no smaller read."""
    ids: IdRange | None
    """Smallest and largest id in its column of tokens. Null where there are no ids, and where the index does not read
    them: for texts, whose tokenizer knows its ids, and for a .bin of Megatron's."""
    num_bad_rows: int = 0
    """Number of rows that could not be read and have no tokens; above 0 only if the recipe masks them."""
    bad_rows: tuple[BadRow, ...] = ()
    """The first of these rows."""
    lists: ListBytes | None = None
    """What its map gives beside ids; null where there is nothing."""


def facts_of(file: FileFacts) -> dict[str, Any]:
    """The fields that all records of a file have."""
    return {name: getattr(file, name) for name in FileFacts.__struct_fields__}


class FileEntry(FileFacts, frozen=True, kw_only=True):
    """One data file of a source."""

    path: str
    """As the recipe gives it: relative to the recipe's folder, or absolute."""
    first_row: int
    """Row of the source at which the file begins."""
    num_rows: int
    """Documents of the file."""
    num_pages: int
    """Pages of the file."""
    tail_bytes: int
    """Bytes that are read twice since pages begin inside rows, in an epoch that reads each page alone."""
    schema: int
    """Index into the source's `schemas`; that entry describes its pages."""
    status: tuple[FileStatus, ...] = ()
    """Status of the file, and of others that its hash covers, taken before hashing; empty where one was new, or in a
    store. A file with the same statuses is not hashed again. Not part of its identity."""


class SourceEntry(SourceWords, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source, as it was indexed."""

    patterns: tuple[str, ...]
    """The recipe's path or paths, which gave `files`."""
    items: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Items in the texts, or those that the column holds: by kind, in the recipe's words."""
    transform_id: str
    """Version of the transform from rows to tokens; the lengths are valid for this version only."""
    vocab_size: int | None
    """Size of the tokenizer's vocabulary; null where the files hold ids."""
    fingerprint: str
    """16 hex digits over all that decides the order of the source's documents."""
    window_pages: int
    """Pages of a shuffle window."""
    num_documents: int
    """Rows of all files, the empty ones included."""
    num_tokens: int
    """Tokens of all documents."""
    num_empty: int
    """Documents without tokens."""
    max_document_tokens: int
    """Tokens of the longest document."""
    file: str
    """File of the arrays, in the catalog's `arrays`."""
    arrays: dict[str, ArrayEntry]
    """Entry of each array, by its name."""
    schemas: tuple[bytes, ...]
    """What decoding needs to know of a file besides its pages, each kind once; base64 in JSON."""
    files: tuple[FileEntry, ...]
    """In the order in which rows are counted: sorted when first indexed, new files at the end."""


class SideEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of further properties, joined to the rows of a source by their id."""

    table: str
    """The copy of the table, in the catalog's `properties`: to join files that come later."""
    columns: tuple[str, ...]
    """Its properties, without the key."""
    files: dict[str, str]
    """Identity of a data file -> the file in `properties` with these columns for its rows."""


class PropertiesEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of the properties of a source's rows."""

    columns: dict[str, str]
    """Property -> column of the data files."""
    id: str | None
    """The property that names each row."""
    files: dict[str, str]
    """Identity of a data file -> the file in `properties` with these columns for its rows."""
    side: tuple[SideEntry, ...] = ()
    """Tables that were joined, the last one first."""


class ViewEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some rows of a source."""

    source: str
    """The source."""
    definition: str
    """16 hex digits over what the recipe says of it, and of what shares the source with it."""
    made_of: str
    """16 hex digits over the source's fingerprint and the properties that it was made from."""
    source_fingerprint: str
    """The source's fingerprint."""
    fingerprint: str
    """16 hex digits over the kept rows and the window."""
    window_units: int
    """Pages of a shuffle window."""
    num_documents: int
    """Kept rows."""
    num_tokens: int
    """Tokens of the kept rows."""
    max_document_tokens: int
    """Tokens of the longest kept row."""
    left: dict[str, int]
    """Rows that it would have, and leaves to a narrower view, by the name of that."""
    in_no_cell: int = 0
    """A cell's: rows of its source, selection or child that are in no cell of its group, held out ones included."""
    file: str | None
    """File of the rows' numbers, in the catalog's `arrays`; null for a source that has all of its rows."""
    arrays: dict[str, ArrayEntry]
    """Entry of each array, by its name."""


class DeniedEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of a source that deny-lists name."""

    lists: dict[str, str]
    """Path of each list, as the recipe gives it, to the first 16 hex digits of the SHA-256 of its bytes."""
    source_fingerprint: str
    """The source's fingerprint."""
    fingerprint: str
    """16 hex digits over the rows; empty where there are none."""
    num_documents: int
    """Denied rows."""
    num_tokens: int
    """Tokens of these rows."""
    file: str | None
    """File of the rows' numbers, in the catalog's `arrays`; null where there are none."""
    arrays: dict[str, ArrayEntry]
    """Entry of each array, by its name."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything in a catalog's folder."""

    version: int
    """CATALOG_VERSION of the code that wrote it."""
    sources: dict[str, SourceEntry]
    """By name, sorted; also those of other recipes that share the folder."""
    superseded: tuple[str, ...]
    """Files of the manifest before this one, kept for jobs on other nodes that have them mapped."""
    properties: dict[str, PropertiesEntry] = {}
    """By source, sorted; of those that have some."""
    views: dict[str, dict[str, ViewEntry]] = {}
    """By part of a recipe, then by name, both sorted."""
    earlier_views: dict[str, dict[str, tuple[ViewEntry, ...]]] = {}
    """Likewise: views that were replaced, the last one first, for runs that continue with other rows."""
    denied: dict[str, DeniedEntry] = {}
    """By source, sorted; of those that were indexed with deny-lists."""


class _Version(msgspec.Struct):
    version: int


_decode_version = msgspec.json.Decoder(_Version).decode
_decode_manifest = msgspec.json.Decoder(Manifest).decode


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a catalog.

    Raises:
        CatalogMissing: There is none.
        CatalogStale: It was written by another version of the format.
        CatalogError: It is damaged or cannot be read.
    """
    path = directory / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CatalogMissing(
            f"there is no catalog at {catalog_place(directory)}; run torchmix index to build it"
        ) from error
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    try:
        version = _decode_version(content).version
        if version != CATALOG_VERSION:
            raise CatalogStale(
                f"the catalog at {catalog_place(directory)} has format version {version}, this torchmix reads "
                f"{CATALOG_VERSION}; run torchmix index to build it again"
            )
        return _decode_manifest(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path} is damaged ({error}); run torchmix index to build the catalog again") from error


def manifest_in(content: bytes) -> Manifest | None:
    """The manifest in bytes of a file; None if they are none of this version."""
    try:
        return _decode_manifest(content) if _decode_version(content).version == CATALOG_VERSION else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as it lies on disk."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of a catalog in one step: a reader, or a crash at any moment, sees the old or the new one.

    Raises:
        OSError: The disk is full or the folder not writable; the old manifest stays.
    """
    new = directory / NEW_MANIFEST_NAME
    with new.open("wb") as file:
        file.write(encode_manifest(manifest))
        file.flush()
        os.fsync(file.fileno())
    new.replace(directory / MANIFEST_NAME)
    flush_folder(directory)


def flush_folder(directory: Path) -> None:
    """Flush the names in a folder to disk, after files in it were made or renamed."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def source_fingerprint(files: Iterable[FileEntry], column: str | None, transform_id: str, window_pages: int) -> str:
    """Fingerprint of what decides a source's order and lengths: identities of files in order, not their paths.

    Returns:
        16 hex digits: the head of the SHA-256 of compact ASCII JSON (`docs/formats.md`).
    """
    return digest_of(
        {
            "format": CATALOG_VERSION,
            "files": [[file.num_bytes, file.footer_hash] for file in files],
            "column": column,
            "transform": transform_id,
            "window_pages": window_pages,
        }
    )


# --- Manifests that runs had, kept beside the present one, so that a run's earlier steps can be planned after an
# edit.
#
# A file appears whole or not at all and is never altered; what it names stays in `arrays` while it is there. Cost:
# about 200 bytes of JSON per data file, once for runs of equal manifests.
#
# Runs write without the catalog's lock: what a run has opened is in the present manifest or the one before, so an
# index run keeps the arrays until the file is there.

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
        CatalogError: The catalog lies in a store, which does not take it.
    """
    folder = catalog_folder / HISTORY_FOLDER
    path = folder / f"{name_of(content)}{suffix}"
    if path.exists() or put_file(catalog_folder, f"{HISTORY_FOLDER}/{path.name}", content):
        return name_of(content)
    folder.mkdir(exist_ok=True)
    write_whole(path, content)
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
