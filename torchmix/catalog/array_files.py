"""Arrays on disk: one file for the arrays of a source, or of many small ones; the manifest holds sizes and checksums.

A file that is shorter, or holds other arrays, than its entries say is an error when it is opened, and never a crash
when it is read; no descriptor stays open. Cost: opening takes some 30 microseconds a file and 3 an array;
`check_content` reads all of it, at about 1 GB/s.
"""

from __future__ import annotations

import io
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.errors import CatalogError, naming

READ_BYTES = 1 << 24
SMALL_BYTES = 1 << 16
"""Files of at most this many bytes are read: a mapping costs more time, and nearly as much memory."""
ALIGN_BYTES = 64
FLUSH_THREADS = 32
PREFIX_BYTES = 10
"""Magic, version and the header's length, of the .npy format's version 1."""

Content = NDArray[np.uint8]
"""All bytes of a file."""


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the manifest says of one array."""

    dtype: str
    """numpy's name with byte order: `<i8`, `<i4`, `|i1`."""
    length: int
    """Number of entries."""
    offset: int
    """Where in its file its header begins."""
    num_bytes: int
    """Bytes of header and entries."""
    crc32: int
    """CRC-32 of these bytes."""


class ArrayWriter:
    """A new file that takes arrays one after the other; `flush_files` then brings it to the disk."""

    def __init__(self, path: Path) -> None:
        """Make the file.

        Raises:
            OSError: It exists, or cannot be made.
        """
        self._file = path.open("xb")
        self._end = 0

    def add(self, arrays: Mapping[str, Sequence[NDArray[Any]]]) -> dict[str, ArrayEntry]:
        """Write arrays behind those written before.

        Args:
            arrays: By name, each as at least one part, one-dimensional and of one dtype. Parts are written one by one,
                so that no second copy is held.

        Raises:
            OSError: The file cannot be written; what was written of it stays.
        """
        entries: dict[str, ArrayEntry] = {}
        for name, parts in arrays.items():
            offset = -(-self._end // ALIGN_BYTES) * ALIGN_BYTES
            header, dtype = _expected(parts[0].dtype.newbyteorder("<").str, sum(map(len, parts)))
            self._file.write(bytes(offset - self._end) + header)
            checksum, end = zlib.crc32(header), offset + len(header)
            for part in parts:
                content = np.ascontiguousarray(part, dtype).view(np.uint8).data
                checksum, end = zlib.crc32(content, checksum), end + len(content)
                self._file.write(content)
            entries[name] = ArrayEntry(
                dtype=dtype.str, length=sum(map(len, parts)), offset=offset, num_bytes=end - offset, crc32=checksum
            )
            self._end = end
        return entries

    def close(self) -> None:
        """Hand the added arrays to the kernel; `OSError` if they do not fit."""
        self._file.close()


def write_arrays(path: Path, arrays: Mapping[str, Sequence[NDArray[Any]]]) -> dict[str, ArrayEntry]:
    """Write arrays to a new file of their own, as `ArrayWriter.add`."""
    writer = ArrayWriter(path)
    try:
        return writer.add(arrays)
    finally:
        writer.close()


def _header(descr: str, length: int) -> bytes:
    """The header of an array in the .npy format."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": (length,)})
    return header.getvalue()


def flush_files(paths: Iterable[str | Path]) -> None:
    """Flush files and folders to the disk; many at once, since a file system writes waiting data together.

    Raises:
        OSError: One cannot be written out.
    """
    with ThreadPoolExecutor(FLUSH_THREADS, "torchmix-flush") as pool:
        for _ in pool.map(_flush, paths):
            pass


_END = struct.Struct("<II")
"""CRC-32 and number of the bytes before it."""


def with_end(about: bytes) -> bytes:
    """What a file says of itself, as its last bytes; see `read_end`."""
    return about + _END.pack(zlib.crc32(about), len(about))


def read_end(read: Callable[[int, int], bytes | memoryview], num_bytes: int) -> bytes:
    """What a file says of itself at its end.

    Args:
        read: Gives some bytes of it, from an offset on.
        num_bytes: Its size.

    Raises:
        ValueError: It is no whole file of this kind.
    """
    tail = read(max(0, num_bytes - _END.size), _END.size)
    if len(tail) < _END.size:
        raise ValueError(f"it has {num_bytes} bytes")
    checksum, end_bytes = _END.unpack(tail)
    about = bytes(read(max(0, num_bytes - _END.size - end_bytes), end_bytes))
    if zlib.crc32(about) != checksum:
        raise ValueError("its end has another checksum")
    return about


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, also where several processes write it; its folder is the caller's to flush.

    Raises:
        OSError: The disk is full or the folder cannot be written; the file that was there stays.
    """
    with put_whole(path, f".{path.name}.{secrets.token_hex(4)}") as aside:
        aside.write_bytes(content)
        _flush(aside)


@contextmanager
def put_whole(path: Path, name: str) -> Iterator[Path]:
    """Where to write a file that is moved to its place at the end; nothing stays of one that fails.

    Args:
        path: Its place; a file that is there stays until then.
        name: What it is called until then, in the same folder.
    """
    aside = path.with_name(name)
    try:
        with naming(path):
            yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _flush(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_arrays(
    path: str | Path, entries: Mapping[str, ArrayEntry], opened: dict[str | Path, Content] | None = None
) -> dict[str, NDArray[Any]]:
    """Arrays of a file, [entry.length] each, read-only: mapped, or read where the file is small.

    Args:
        path: The file, which may hold other arrays, too.
        entries: The wanted arrays.
        opened: Files that earlier calls opened; this call adds its own. By default nothing is shared.

    Raises:
        CatalogError: The file is missing, is shorter, or has other arrays than the entries say.
    """
    content = None if opened is None else opened.get(path)
    if content is None:
        content = file_content(path)
        if opened is not None:
            opened[path] = content
    wanted_bytes = max([entry.offset + entry.num_bytes for entry in entries.values()], default=0)
    if len(content) < wanted_bytes:
        raise _damaged(path, f"has {len(content)} bytes, its manifest says at least {wanted_bytes}")
    try:
        return arrays_in(content, entries, path)
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error


def file_content(path: str | Path) -> Content:
    """All of a file, mapped or read; `CatalogError` if it is missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes <= SMALL_BYTES:
                return np.frombuffer(os.pread(descriptor, num_bytes, 0), np.uint8)
            # Python's mmap would keep a descriptor; hundreds of sources would exceed the usual limit.
            with pa.memory_map(f"/dev/fd/{descriptor}") as mapped:
                return np.frombuffer(mapped.read_buffer(), np.uint8)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise _damaged(path, "is missing") from error
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error


def arrays_in(content: Content, entries: Mapping[str, ArrayEntry], path: str | Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, as views of its content; `path` is for messages.

    Raises:
        CatalogError: It holds other arrays than the entries say.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name, entry in entries.items():
        header, dtype = _expected(entry.dtype, entry.length)
        begin = entry.offset + len(header)
        end = begin + entry.length * dtype.itemsize
        if end == entry.offset + entry.num_bytes and content[entry.offset : begin].tobytes() == header:
            arrays[name] = content[begin:end].view(dtype)
        else:
            arrays[name] = _array_in(content, name, entry, path)
    return arrays


@lru_cache(maxsize=1024)
def _expected(descr: str, length: int) -> tuple[bytes, np.dtype[Any]]:
    """The header of an array, as this numpy writes it, and its dtype. Cached: most arrays of small sources have one of
    few lengths."""
    return _header(descr, length), np.dtype(descr)


def _array_in(content: Content, name: str, entry: ArrayEntry, path: str | Path) -> NDArray[Any]:
    """One array of a file's content; another numpy may have padded its header differently."""
    begins = content[entry.offset : entry.offset + PREFIX_BYTES].tobytes()
    header_bytes = PREFIX_BYTES + int.from_bytes(begins[-2:], "little")
    head = content[entry.offset : entry.offset + header_bytes].tobytes()
    # Compared as text: numpy's own reader evaluates it as Python, which two threads of 3.11 may not do at once.
    if (
        not head.startswith(b"\x93NUMPY\x01")
        or f"'descr': '{entry.dtype}'".encode() not in head
        or f"'shape': ({entry.length},)".encode() not in head
    ):
        raise _damaged(path, f"does not hold {name} as an array of {entry.dtype} [{entry.length}]")
    dtype = np.dtype(entry.dtype)
    if header_bytes + entry.length * dtype.itemsize != entry.num_bytes:
        held = entry.num_bytes - header_bytes
        raise _damaged(path, f"has {held} bytes of {name}, not {entry.dtype} [{entry.length}]")
    return content[entry.offset + header_bytes : entry.offset + entry.num_bytes].view(dtype)


def check_content(path: Path, entries: Mapping[str, ArrayEntry]) -> None:
    """Read the whole file and compare its checksums.

    Raises:
        CatalogError: The file is missing or differs from what was written.
    """
    try:
        with path.open("rb") as file:
            for name, entry in entries.items():
                file.seek(entry.offset)
                checksum, left_bytes = 0, entry.num_bytes
                while left_bytes and (content := file.read(min(READ_BYTES, left_bytes))):
                    checksum = zlib.crc32(content, checksum)
                    left_bytes -= len(content)
                if checksum != entry.crc32:
                    raise _damaged(path, f"has checksum {checksum:08x} of {name}, its manifest says {entry.crc32:08x}")
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from error


def _damaged(path: str | Path, what: str) -> CatalogError:
    return CatalogError(f"the catalog's file {path} {what}; run torchmix index to build it again")
