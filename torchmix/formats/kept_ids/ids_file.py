"""Ids of one data file on disk: what its rows became when it was indexed.

    [ids of all rows, end to end, 2 or 4 bytes each, little-endian] [what they are, in msgpack] [its CRC-32 and bytes]

In: ids of pages in the order of rows, as they are made. Out: a file that can be mapped, or None. Must hold: a file
belongs to one content of one data file, by size and hash, and to one transform: with any other it is not found, or not
taken. It is whole or missing; it may be deleted at any time, and then rows are encoded again. So a disk that has no
room, or fails, costs the file and nothing else. Cost: 2 bytes an id where all are below 65,536, else 4; 12 a page.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

logger = logging.getLogger(__name__)

KEPT_FOLDER = "kept"
VERSION = 1
NARROW, WIDE = np.dtype("<u2"), np.dtype("<i4")
_END = struct.Struct("<II")
_FILE = re.compile(r"(?P<source>.+)\.[0-9a-f]{16}\.ids(\.tmp)?")


class _IdsOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the ids are of."""

    version: int
    identity: tuple[int, str, str, str]
    dtype: str
    ids_of_page: bytes
    """[P] int64, how many ids each page has."""
    crc_of_page: bytes
    """[P] uint32, CRC-32 of the bytes of each page's ids."""


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of ids that was found whole, as far as its end tells."""

    path: Path
    num_bytes: int
    digest: str
    """32 hex digits over its end: with its size, its identity."""
    dtype: str
    """Type of an id, as NumPy writes it."""
    ids_of_page: Int64Array
    crc_of_page: NDArray[np.uint32]


def kept_path(folder: Path, source: str, identity: tuple[int, str, str, str]) -> Path:
    """Where the ids of one data file lie.

    Args:
        folder: The catalog's folder.
        source: The source's name.
        identity: Size and hash of the data file, column, transform.
    """
    key = msgspec.json.encode([VERSION, *identity])
    return Path(f"{folder}/{KEPT_FOLDER}/{source}.{hashlib.sha256(key).hexdigest()[:16]}.ids")


_decode_ids_of = msgspec.msgpack.Decoder(_IdsOf).decode


def read_kept(path: Path, identity: tuple[int, str, str, str]) -> KeptFile | None:
    """What a file of ids says of itself; None if there is none, or it is damaged, which is logged."""
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            end = _read_end(file, num_bytes)
            about = _decode_ids_of(end)
        ids_of_page = np.frombuffer(about.ids_of_page, "<i8").astype(np.int64)
        width = np.dtype(about.dtype).itemsize
        if about.version != VERSION or about.identity != identity:
            raise ValueError("it is of another file or transform")
        if int(ids_of_page.sum()) * width + len(end) + _END.size != num_bytes:
            raise ValueError(f"it has {num_bytes} bytes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, msgspec.DecodeError) as error:
        logger.warning(
            "ids kept in %s are damaged (%s); delete the file, or run torchmix index --keep-tokens", path, error
        )
        return None
    return KeptFile(
        path=path,
        num_bytes=num_bytes,
        digest=digest_of_end(end),
        dtype=about.dtype,
        ids_of_page=ids_of_page,
        crc_of_page=np.frombuffer(about.crc_of_page, "<u4").astype(np.uint32),
    )


def digest_of_end(end: bytes) -> str:
    """32 hex digits over what a file says of itself, its checksums included."""
    return hashlib.sha256(end).hexdigest()[:32]


def read_end(file: Any) -> bytes:
    """What an open `RandomAccessFile` of ids says of itself.

    Raises:
        ValueError: It is no whole file of ids.
    """
    tail = file.read(max(0, file.num_bytes - _END.size), _END.size)
    if len(tail) < _END.size:
        raise ValueError(f"it has {file.num_bytes} bytes")
    checksum, num_bytes = _END.unpack(tail)
    end = bytes(file.read(max(0, file.num_bytes - _END.size - num_bytes), num_bytes))
    if zlib.crc32(end) != checksum:
        raise ValueError("its end has another checksum")
    return end


def _read_end(file: Any, num_bytes: int) -> bytes:
    file.seek(max(0, num_bytes - _END.size))
    tail = file.read(_END.size)
    if len(tail) < _END.size:
        raise ValueError(f"it has {num_bytes} bytes")
    checksum, end_bytes = _END.unpack(tail)
    file.seek(max(0, num_bytes - _END.size - end_bytes))
    end: bytes = file.read(end_bytes)
    if zlib.crc32(end) != checksum:
        raise ValueError("its end has another checksum")
    return end


def kept_bytes(folder: Path) -> dict[str, int]:
    """Bytes of the ids that a catalog's folder keeps, by source."""
    found: dict[str, int] = {}
    kept = folder / KEPT_FOLDER
    for path in kept.iterdir() if kept.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and not path.name.endswith(".tmp"):
            found[match["source"]] = found.get(match["source"], 0) + path.stat().st_size
    return found


def remove_stale(folder: Path, current: Iterable[Path], sources: Iterable[str]) -> None:
    """Remove files of ids of these sources that are not among the current ones, and unfinished ones."""
    kept, names, wanted = folder / KEPT_FOLDER, set(sources), set(current)
    for path in kept.iterdir() if kept.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and match["source"] in names and path not in wanted:
            path.unlink(missing_ok=True)
    if kept.is_dir() and not any(kept.iterdir()):
        kept.rmdir()


class IdsWriter:
    """Writes the ids of one data file, whole or not at all; a context.

    Where they cannot be written, one warning says why, there is no file, and the rest is ignored.
    """

    def __init__(self, path: Path, identity: tuple[int, str, str, str]) -> None:
        """Begin a file beside `path`."""
        self._path, self._identity = path, identity
        self._unfinished = path.with_name(path.name + ".tmp")
        self._file: BufferedRandom | None = None
        self._dtype: np.dtype[Any] = NARROW
        self._ids_of_page: list[Int64Array] = []
        with self._given_up_if_it_fails():
            path.parent.mkdir(exist_ok=True)
            self._file = self._unfinished.open("w+b")

    def __enter__(self) -> IdsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()  # unless it was finished

    def add(self, values: NDArray[np.integer[Any]], ids_of_page: Int64Array) -> None:
        """Add the ids of some pages, in the order of rows; `ids_of_page` says how many each has."""
        if self._file is None:
            return
        with self._given_up_if_it_fails():
            if self._dtype == NARROW and len(values) and int(values.max()) >= 1 << 16:
                self._file = self._widened(self._file)
            self._file.write(np.ascontiguousarray(values, self._dtype).data)
            self._ids_of_page.append(np.asarray(ids_of_page, np.int64))

    def finish(self) -> None:
        """Put what the ids are behind them, and give the file its name."""
        if self._file is None:
            return
        counts = np.concatenate([np.zeros(0, np.int64), *self._ids_of_page])
        with self._given_up_if_it_fails():
            self._file.flush()
            about = _IdsOf(
                version=VERSION,
                identity=self._identity,
                dtype=self._dtype.str,
                ids_of_page=counts.astype("<i8").tobytes(),
                crc_of_page=_checksums(self._file, counts * self._dtype.itemsize).astype("<u4").tobytes(),
            )
            end = msgspec.msgpack.encode(about)
            self._file.seek(0, 2)
            self._file.write(end + _END.pack(zlib.crc32(end), len(end)))
            self._file.close()
            self._unfinished.replace(self._path)
            self._file = None

    @contextmanager
    def _given_up_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._drop()
            logger.warning(
                "ids cannot be kept in %s (%s); the index goes on, and training tokenizes these rows. Make room, then "
                "run torchmix index --keep-tokens",
                self._path,
                error.strerror or error,
            )

    def _drop(self) -> None:
        """End an unfinished file."""
        if self._file is not None:
            with suppress(OSError):  # of what is still in its buffer
                self._file.close()
            self._file = None
            self._unfinished.unlink(missing_ok=True)

    def _widened(self, narrow: BufferedRandom) -> BufferedRandom:
        """The file with all ids so far in 4 bytes each."""
        narrow.flush()
        narrow.seek(0)
        path = self._unfinished.with_name(self._unfinished.name.removesuffix(".tmp") + ".wide.tmp")
        wide = path.open("w+b")
        try:
            while block := narrow.read(1 << 22):
                wide.write(np.frombuffer(block, NARROW).astype(WIDE).data)
            wide.flush()
            path.replace(self._unfinished)
        except BaseException:
            with suppress(OSError):
                wide.close()
            path.unlink(missing_ok=True)
            raise
        narrow.close()
        self._dtype = WIDE
        return wide


def _checksums(file: BufferedRandom, bytes_of_page: Int64Array) -> NDArray[np.uint32]:
    stops = np.cumsum(bytes_of_page)
    if not len(stops) or not stops[-1]:
        return np.zeros(len(stops), np.uint32)
    with mmap.mmap(file.fileno(), int(stops[-1]), prot=mmap.PROT_READ) as content:
        view = memoryview(content)
        found = [zlib.crc32(view[start:stop]) for start, stop in pairwise([0, *stops.tolist()])]
        view.release()
    return np.array(found, np.uint32)
