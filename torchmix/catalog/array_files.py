"""Arrays on disk: one .npy file each, with its size and checksum kept apart from it.

In: one-dimensional arrays, in parts. Out: an `ArrayEntry`, with which the file is opened read-only, in general mapped.
Must hold: a file that is shorter, longer or of another type than its entry is an error when it is opened, and never a
crash when it is read. Cost: opening takes some 20 microseconds; `check_content` reads all of it, at about 1 GB/s.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.errors import CatalogError

READ_BYTES = 1 << 24
SMALL_BYTES = 1 << 14
"""Arrays of up to so many bytes are read: a mapping costs more, and nearly as much memory."""
PREFIX_BYTES = 10
"""Magic, version and the header's length, of the .npy format's version 1."""


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the manifest says of one array."""

    dtype: str
    """numpy's name with byte order: `<i8`, `<i4`, `|i1`."""
    length: int
    """Number of entries."""
    num_bytes: int
    """Size of the file, its header included."""
    crc32: int
    """Of the whole file."""


def write_array(path: Path, parts: Sequence[NDArray[Any]]) -> ArrayEntry:
    """Write the concatenation of arrays of one dtype to a new file and flush it to disk.

    Args:
        path: A file that does not exist.
        parts: At least one array, each one-dimensional; written one by one, so that no second copy is held.

    Raises:
        OSError: The file exists or cannot be written.
    """
    dtype, length = parts[0].dtype.newbyteorder("<"), sum(len(part) for part in parts)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})
    checksum = zlib.crc32(header.getvalue())
    with path.open("xb") as file:
        file.write(header.getvalue())
        for part in parts:
            content = np.ascontiguousarray(part, dtype).view(np.uint8).data
            checksum = zlib.crc32(content, checksum)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        num_bytes = file.tell()
    return ArrayEntry(dtype=dtype.str, length=length, num_bytes=num_bytes, crc32=checksum)


def open_array(path: str | Path, entry: ArrayEntry) -> NDArray[Any]:
    """An array, [entry.length], read-only: mapped, or read where it is small. No descriptor stays open.

    Raises:
        CatalogError: The file is missing, or has another size or type than the entry says.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes != entry.num_bytes:
                raise _damaged(path, f"has {num_bytes} bytes, its manifest says {entry.num_bytes}")
            content: bytes | pa.Buffer = os.pread(descriptor, SMALL_BYTES, 0)
            offset = _checked_offset(path, content, entry)
            if num_bytes > SMALL_BYTES:
                # Python's mmap would keep a descriptor for each array; hundreds of sources exceed the usual limit.
                with pa.memory_map(f"/dev/fd/{descriptor}") as mapped:
                    content = mapped.read_buffer()
        finally:
            os.close(descriptor)
        if not entry.length:
            return np.zeros(0, entry.dtype)
        return np.frombuffer(content, entry.dtype, entry.length, offset)
    except FileNotFoundError as error:
        raise _damaged(path, "is missing") from error
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error


def _checked_offset(path: str | Path, head: bytes, entry: ArrayEntry) -> int:
    """Where the entries begin, in a file that begins with `head`."""
    offset = PREFIX_BYTES + int.from_bytes(head[PREFIX_BYTES - 2 : PREFIX_BYTES], "little")
    # Compared as text: numpy's own reader evaluates it as Python, which two threads of 3.11 may not do at once.
    expected = (f"'descr': '{entry.dtype}'".encode(), f"'shape': ({entry.length},)".encode())
    if not head.startswith(b"\x93NUMPY\x01") or not all(text in head[:offset] for text in expected):
        raise _damaged(path, f"does not begin as an array of {entry.dtype} [{entry.length}]")
    if offset + entry.length * np.dtype(entry.dtype).itemsize != entry.num_bytes:
        raise _damaged(path, f"has {entry.num_bytes - offset} bytes of entries, not {entry.dtype} [{entry.length}]")
    return offset


def check_content(path: Path, entry: ArrayEntry) -> None:
    """Read the whole file and compare its checksum.

    Raises:
        CatalogError: The file is missing or differs from what was written.
    """
    checksum = 0
    try:
        with path.open("rb") as file:
            while content := file.read(READ_BYTES):
                checksum = zlib.crc32(content, checksum)
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from error
    if checksum != entry.crc32:
        raise _damaged(path, f"has checksum {checksum:08x}, its manifest says {entry.crc32:08x}")


def _damaged(path: str | Path, what: str) -> CatalogError:
    return CatalogError(f"the catalog's array {path} {what}; run torchmix index to build it again")
