"""A catalog in a store: its copy on this host, which all else maps as any catalog, and what is published from there."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from torchmix.catalog.array_files import file_content, flush_files, write_whole
from torchmix.errors import CatalogConflict, CatalogError, SourceUnreadable
from torchmix.storage.store_file import ObjectFacts, StoreFile, delete_object, list_objects, put_object
from torchmix.storage.stores import is_uri

# --- Where the copy of a catalog lies.
#
# A folder of this host, by the catalog's address. It may be deleted at any time when nothing uses it.

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TORCHMIX_CACHE"
"""Names the folder of all copies; else they lie in the user's cache folder."""
ADDRESS_NAME = "address"
"""The file of a copy that says whose copy it is."""
MOST_NAME = 60
"""Most characters of an address in the name of its copy."""


def catalog_folder(directory: Path, catalog: str) -> Path:
    """The folder of a catalog on this host.

    Args:
        directory: The recipe's folder.
        catalog: A path from there, or an address in a store, whose copy's folder is made if it is missing.

    Raises:
        CatalogError: The folder of the copy cannot be made.
    """
    if not is_uri(catalog):
        return directory / catalog
    address = catalog.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", address)[-MOST_NAME:].strip("-.")
    with _local(address):
        folder = _copies() / f"{readable}.{hashlib.sha256(address.encode()).hexdigest()[:12]}"
        if not (folder / ADDRESS_NAME).exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / ADDRESS_NAME, address.encode())
    return folder


def fetch_catalog(directory: Path, catalog: str) -> Path:
    """As `catalog_folder`; a copy is brought up to date.

    Raises:
        CatalogError, SourceUnreadable: As `refresh`.
    """
    folder = catalog_folder(directory, catalog)
    refresh(folder)
    return folder


def address_of(folder: Path) -> str | None:
    """The address of the catalog that a folder is a copy of; None for a catalog of its own."""
    try:
        return (folder / ADDRESS_NAME).read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CatalogError(
            f"the catalog's folder {folder} cannot be read: {error.strerror}; make it readable for this user, or name "
            "another one in the recipe's catalog key"
        ) from error


def catalog_place(folder: Path) -> str | Path:
    """What a message calls a catalog: its address in a store, or its folder."""
    return address_of(folder) or folder


def _copies() -> Path:
    """The folder of all copies."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "torchmix"
    except RuntimeError as error:  # a user without a home
        raise OSError(0, str(error)) from None


@contextmanager
def _local(address: str) -> Iterator[None]:
    """What goes wrong with the disk of the copy, told with what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or "its folder"
        raise CatalogError(
            f"the catalog at {address} cannot be copied to this host: {where}: {error.strerror or error}; make room, "
            f"or let {CACHE_VARIABLE} name a folder on a disk of this host"
        ) from error


@contextmanager
def _alone(folder: Path, address: str) -> Iterator[None]:
    """One process of this host at a time copies; the others wait and find what it has copied."""
    with _local(address):
        descriptor = os.open(folder / ".copy.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with _local(address):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process of this host that copies the catalog %s", address)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # also releases the lock


def _write(path: Path, content: bytes) -> None:
    """Write a file of the copy, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    write_whole(path, content)


# --- What a store has of a catalog.
#
#     ADDRESS/
#         published/NUMBER.HASH.json   the manifest, with size and hash of each other object; the highest number holds
#         arrays/...  properties/...   as in a catalog's folder; an object is never altered
#         history/...  profile.json    as there; whoever may write puts them
#
# The copy has the same names. Its `published` are the present one and the one before.

PUBLISHED_VERSION = 1
PUBLISHED_FOLDER = "published"
PUBLISHED = re.compile(PUBLISHED_FOLDER + r"/(?P<number>\d{9})\.(?P<hash>[0-9a-f]{16})\.json")
KEPT = re.compile(r"history/(?P<hash>[0-9a-f]{16})\.[a-z]+\.json")
"""Objects that are named by their content."""
REPLACED_NAME = "profile.json"
"""The one object that is replaced."""
OBJECT = re.compile(r"arrays/[^/]+\.[0-9a-f]{8}|properties/[^/]+\.arrow")
"""Objects that are published: a name leads nowhere else, whoever wrote it."""
MANIFEST_NAME = "manifest.json"


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes objects a catalog."""

    version: int
    """PUBLISHED_VERSION of the code that wrote it."""
    files: dict[str, tuple[int, str]]
    """Name of each object, sorted, to its bytes and the first 32 hex digits of their SHA-256."""
    manifest: msgspec.Raw
    """The manifest, byte for byte."""


_decode = msgspec.json.Decoder(Published).decode


def _decoded(content: bytes, name: str, address: str) -> Published:
    """Raises CatalogError where a content is not what was published under this name."""
    if _hash(content)[:16] == _numbered(name)[1]:
        with suppress(msgspec.MsgspecError):
            if (found := _decode(content)).version == PUBLISHED_VERSION and all(map(OBJECT.fullmatch, found.files)):
                return found
        raise CatalogError(f"{address}/{name} is of another version of torchmix; run torchmix index with this one")
    raise CatalogError(f"{address}/{name} was altered: its name has the hash of its content; run torchmix index")


def _hash(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _numbered(name: str) -> tuple[int, str]:
    match = PUBLISHED.fullmatch(name)
    assert match is not None, "a name of what was published"
    return int(match["number"]), match["hash"]


def _latest(listing: Mapping[str, ObjectFacts]) -> str | None:
    """The name of what holds: the highest number, and of several that have it the one that was written first."""
    names = [name for name in listing if PUBLISHED.fullmatch(name)]
    return min(names, key=lambda name: (-_numbered(name)[0], listing[name].written_s or 0, name), default=None)


def _here(folder: Path) -> list[str]:
    """Names of what the copy has as published, the present one first."""
    names = [f"{PUBLISHED_FOLDER}/{path.name}" for path in (folder / PUBLISHED_FOLDER).glob("[0-9]*.json")]
    return sorted(filter(PUBLISHED.fullmatch, names), reverse=True)


# --- The copy is brought up to date, and gets the objects that are opened.
#
# A file of the copy is whole and what was published, or missing. Ranks of a host that start together ask the store
# twice at most, and copy each object once. Cost: one listing where nothing is new.

THREADS = 16
RANGE_BYTES = 8 << 20
REFRESHED_NAME = ".refreshed"
COMING_FOLDER = ".coming"


def refresh(folder: Path) -> None:
    """Bring manifest and history of a copy up to date; nothing for a catalog of its own. Arrays come by `bring`.

    Raises:
        CatalogError: What was published was altered, or is of another version; or this host has no room for it.
        SourceUnreadable: The store cannot be read.
    """
    address = address_of(folder)
    if address is None:
        return
    asked_ns = time.time_ns()
    with _alone(folder, address):
        note = folder / REFRESHED_NAME
        if note.exists() and asked_ns <= note.stat().st_mtime_ns <= time.time_ns():  # and no clock was set back
            return  # by another process, while this one waited
        begun_ns = time.time_ns()
        listing = list_objects(address)
        _take_others(folder, address, listing)
        _take_published(folder, address, _latest(listing))
        with _local(address):
            note.touch()
            os.utime(note, ns=(begun_ns, begun_ns))


def refresh_history(folder: Path) -> None:
    """As `refresh`, of what runs have put there alone."""
    if (address := address_of(folder)) is not None:
        with _alone(folder, address):
            _take_others(folder, address, list_objects(address))


def bring(folder: Path, names: Iterable[str]) -> None:
    """Copy objects of a catalog that its copy lacks; nothing for a catalog of its own.

    Raises:
        CatalogError: An object is missing, was altered, or was never published; or this host has no room for it.
        SourceUnreadable: The store cannot be read.
    """
    missing = [name for name in dict.fromkeys(names) if not (folder / name).exists()]
    address = address_of(folder) if missing else None
    if address is None:
        return
    with _alone(folder, address):
        files = {name: facts for one in reversed(_here(folder)) for name, facts in _files_of(folder, one).items()}
        wanted = {name: files.get(name) for name in missing if not (folder / name).exists()}
        for name, facts in wanted.items():
            if facts is None:
                raise CatalogError(f"{address} has no {name}; run torchmix index")
        _copy(folder, address, {name: facts for name, facts in wanted.items() if facts is not None})


def _take_published(folder: Path, address: str, name: str | None) -> None:
    """Make what the store has as published the copy's."""
    here = _here(folder)
    if here[:1] == [name] and (folder / MANIFEST_NAME).exists():
        return
    if name is None:  # not published yet, or the catalog was deleted
        with _local(address):
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
        return
    _keep_published(folder, address, name, _read(address, name))


def _keep_published(folder: Path, address: str, name: str, content: bytes) -> None:
    """The arrays of the one before stay for processes that have opened its manifest, and not yet all of its arrays."""
    found = _decoded(content, name, address)
    others = [other for other in _here(folder) if other != name]
    before = [other for other in others if other < name][:1]  # a higher one is of a catalog that was deleted
    used = {*found.files, *(file for other in before for file in _files_of(folder, other))}
    with _local(address):
        for other in set(others) - set(before):
            for file in set(_files_of(folder, other)) - used:
                (folder / file).unlink(missing_ok=True)
            (folder / other).unlink(missing_ok=True)
        _write(folder / name, content)
        _write(folder / MANIFEST_NAME, bytes(found.manifest))


def _files_of(folder: Path, name: str) -> dict[str, tuple[int, str]]:
    """The objects of something published that the copy has; none if it is damaged here, and then others are copied."""
    try:
        return _decoded((folder / name).read_bytes(), name, str(folder)).files
    except (OSError, CatalogError):
        return {}


def _take_others(folder: Path, address: str, listing: Mapping[str, ObjectFacts]) -> None:
    """Make the history of runs, and the profile, those of the store."""
    kept = {name for name in listing if KEPT.fullmatch(name)}
    here = {f"history/{path.name}" for path in (folder / "history").glob("*.json")}
    with _local(address):
        for name in here - kept:
            (folder / name).unlink(missing_ok=True)
    with _threads() as pool:
        for name, content in pool.map(lambda name: (name, _read(address, name)), sorted(kept - here)):
            match = KEPT.fullmatch(name)
            if match is None or _hash(content)[:16] != match["hash"]:
                logger.warning("%s/%s was altered: its name is a hash of its content; it is left out", address, name)
                continue
            with _local(address):
                _write(folder / name, content)
    path, facts = folder / REPLACED_NAME, listing.get(REPLACED_NAME)
    with _local(address):
        if facts is None:
            path.unlink(missing_ok=True)
            return
        if facts.written_s is not None and path.exists():
            found = path.stat()
            if (found.st_size, found.st_mtime) == (facts.num_bytes, facts.written_s):
                return
        _write(path, _read(address, REPLACED_NAME))
        if facts.written_s is not None:
            os.utime(path, (facts.written_s, facts.written_s))


def _read(address: str, name: str) -> bytes:
    """A small object."""
    file = StoreFile(f"{address}/{name}", f"catalog {address}/{name}")
    try:
        return file.read(0, file.num_bytes)
    finally:
        file.close()


def _copy(folder: Path, address: str, files: Mapping[str, tuple[int, str]]) -> None:
    """Copy objects by ranges, many at once; they get their names when all of them are here and what was published."""
    coming = folder / COMING_FOLDER
    paths = {name: coming / str(number) for number, name in enumerate(files)}
    with _local(address):
        shutil.rmtree(coming, ignore_errors=True)  # of a process that was killed
        coming.mkdir()
    try:
        with _threads() as pool:
            opened = dict(zip(files, pool.map(lambda name: _open(address, name, *files[name]), files), strict=True))
            ranges = [(name, at) for name in files for at in range(0, max(files[name][0], 1), RANGE_BYTES)]
            with _local(address):
                for path in paths.values():
                    path.touch()
                list(pool.map(lambda one: _copy_range(opened[one[0]], paths[one[0]], one[1]), ranges))
                list(pool.map(lambda name: _check(paths[name], address, name, *files[name]), files))
        with _local(address):
            flush_files(paths.values())
            for name, path in paths.items():
                (folder / name).parent.mkdir(exist_ok=True)
                path.replace(folder / name)
    finally:
        shutil.rmtree(coming, ignore_errors=True)


def _open(address: str, name: str, num_bytes: int, _: str) -> StoreFile:
    uri = f"{address}/{name}"
    try:
        file = StoreFile(uri, f"catalog {uri}")
    except SourceUnreadable as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CatalogError(f"{uri} was deleted; run torchmix index to build it again") from error
        raise
    if file.num_bytes != num_bytes:
        raise _altered(uri, f"{file.num_bytes} bytes and not {num_bytes}")
    return file


def _copy_range(file: StoreFile, path: Path, offset: int) -> None:
    content = file.read(offset, RANGE_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        while content:
            done = os.pwrite(descriptor, content, offset)
            content, offset = content[done:], offset + done
    finally:
        os.close(descriptor)


def _check(path: Path, address: str, name: str, num_bytes: int, expected: str) -> None:
    content = file_content(path).data
    if (found := _hash(content)) != expected or len(content) != num_bytes:
        raise _altered(f"{address}/{name}", f"the hash {found} and not {expected}")


def _altered(uri: str, what: str) -> CatalogError:
    return CatalogError(
        f"{uri} was altered since it was published, it has {what}; nothing of it is used, run torchmix index to build "
        "it again"
    )


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that copy; after an error they begin nothing more."""
    pool = ThreadPoolExecutor(THREADS, "torchmix-copy")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


# --- What is published from a copy.
#
# Objects come first, under names that nobody else writes, and what makes a catalog of them last, as one object under
# the next number. Two writers may put the same number: so each looks afterwards who else has, and takes its own back
# where it is not alone. As a listing shows all that was written before it, at most one of them stays content; one that
# is killed in between leaves what was written first. A writer that is killed earlier leaves objects that nothing
# names; they are removed by a later one, a day after they were written, since another writer may be about to name them.

LEFT_S = 24 * 3600.0
"""Age, by the store's clock, from which objects that nothing names are removed."""


def put_file(folder: Path, name: str, content: bytes) -> bool:
    """Put a history's file or the profile into the store of a copy, and the copy. False for a catalog of its own.

    Raises:
        CatalogError: This host has no room for it.
        SourceUnreadable: The store does not take it.
    """
    address = address_of(folder)
    if address is None:
        return False
    with _alone(folder, address):
        put_object(f"{address}/{name}", content)
        with _local(address):
            _write(folder / name, content)
    return True


def publish_copy(
    folder: Path, manifest: bytes, names: Collection[str], *, is_base: Callable[[bytes], bool], is_pruned: bool = True
) -> None:
    """Publish a manifest to the store of a copy; nothing for a catalog of its own.

    Objects that the store has lost are put again, as far as the copy has them.

    Args:
        folder: The copy, with the catalog's lock.
        manifest: What is to be published.
        names: All objects that stay: those that the manifest and the history of runs name.
        is_base: Whether a manifest is the one that this one was made from; empty where none is published.
        is_pruned: Whether objects that nothing names are removed.

    Raises:
        CatalogConflict: Another manifest was published since.
        CatalogError: This host has no room.
        SourceUnreadable: The store does not take it; what was published before holds.
    """
    address = address_of(folder)
    if address is None:
        return
    with _alone(folder, address):
        listing = list_objects(address)
        at = _latest(listing)
        old, content = None, b""
        if at is not None:
            content = (folder / at).read_bytes() if at in _here(folder) else _read(address, at)
            try:
                old = _decoded(content, at, address)
            except CatalogError as error:
                logger.warning("%s; what is published now takes its place", error)
        if (at is None or old is not None) and not is_base(b"" if old is None else bytes(old.manifest)):
            raise _conflict(address)
        files = {} if old is None else {name: facts for name, facts in old.files.items() if name in names}
        fresh = [name for name in sorted(names) if _is_due(name, files, listing) and (folder / name).exists()]
        with _threads() as pool, _local(address):
            files |= zip(fresh, pool.map(lambda name: _put(folder, address, name), fresh), strict=True)
        found = Published(version=PUBLISHED_VERSION, files=dict(sorted(files.items())), manifest=msgspec.Raw(manifest))
        if (new_content := msgspec.json.encode(found)) == content:
            return
        number = 1 if at is None else _numbered(at)[0] + 1
        new = f"{PUBLISHED_FOLDER}/{number:09d}.{_hash(new_content)[:16]}.json"
        put_object(f"{address}/{new}", new_content)
        seen = list_objects(f"{address}/{PUBLISHED_FOLDER}")
        seen = {f"{PUBLISHED_FOLDER}/{name}": facts for name, facts in seen.items()}
        if any(PUBLISHED.fullmatch(name) and name != new and _numbered(name)[0] >= number for name in seen):
            delete_object(f"{address}/{new}")
            raise _conflict(address)
        _keep_published(folder, address, new, new_content)
        used = {at, new, *files, *(() if old is None else old.files)}
        if is_pruned and new in seen:
            _remove_old(address, listing, used, seen[new].written_s)


def _conflict(address: str) -> CatalogConflict:
    return CatalogConflict(f"the catalog at {address} was published by another process meanwhile")


def _is_due(name: str, files: Mapping[str, tuple[int, str]], listing: Mapping[str, ObjectFacts]) -> bool:
    """Whether the store lacks an object, or has another."""
    facts = listing.get(name)
    return name not in files or facts is None or facts.num_bytes != files[name][0]


def _put(folder: Path, address: str, name: str) -> tuple[int, str]:
    content = file_content(folder / name).data
    put_object(f"{address}/{name}", content)
    return len(content), _hash(content)


def _remove_old(
    address: str, listing: Mapping[str, ObjectFacts], used: Collection[str | None], now_s: float | None
) -> None:
    """Remove what nothing names, and was not written lately."""
    try:
        for name, facts in listing.items():
            if name in used or now_s is None or facts.written_s is None:
                continue
            if (OBJECT.fullmatch(name) or PUBLISHED.fullmatch(name)) and now_s - facts.written_s >= LEFT_S:
                delete_object(f"{address}/{name}")
    except SourceUnreadable as error:
        logger.warning("%s; objects that nothing names stay in %s", error, address)
