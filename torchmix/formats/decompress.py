"""Compressed bytes -> exactly as many bytes as their format says they hold, or an error; and their CRC-32."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import pyarrow as pa

# --- CRC-32 of bytes that lie end to end, from the CRC-32 of each part.
#
# It is what `zlib.crc32` gives of all the bytes. Cost: some 20 microseconds for parts of a new size, 3 for one that
# came before; no byte is read again.
#
# A CRC is the remainder of a polynomial over GF(2). Bytes behind it multiply it by a power of x, and add their own
# remainder: `crc32_combine` of zlib (https://github.com/madler/zlib/blob/develop/crc32.c) by Mark Adler.

_POLYNOMIAL = 0xEDB88320  # of CRC-32, the highest power in the lowest bit
_ONE = 1 << 31


def join_checksums(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two parts end to end; the second has `second_bytes`, 0 or more."""
    return _multiply(_power_of_bytes(second_bytes), first) ^ second


@lru_cache(maxsize=4096)
def _power_of_bytes(num_bytes: int) -> int:
    """x to the 8 * `num_bytes`."""
    power, square = _ONE, _ONE >> 8
    while num_bytes:
        if num_bytes & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        num_bytes >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of CRC-32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


# --- Compressed bytes -> exactly as many bytes as their format says they hold, or an error.
#
# Fewer or more are an error. `pyarrow.Codec.decompress` alone does not promise this: of lz4, lz4_raw, snappy, gzip
# and brotli it gives a buffer of the size that was asked for also where less came out, and the rest of that buffer is
# whatever memory held before. So each codec is asked in a way that tells what came out:
#
#     zstd     by its own decoder, which compares the size
#     snappy   by the size that the content begins with, which its decoder compares
#     gzip     by zlib, which gives what came out
#     lz4      as a stream, likewise
#     brotli   as a stream, likewise
#     lz4_raw  once more, into one byte less, which must fail: the format states no size, and no stream reads it
#
# Cost, against `pyarrow.Codec.decompress`: none for zstd and snappy, 0.02 for gzip, 0.05 for brotli, 0.2 for lz4, 1
# for lz4_raw, which is the fastest of them: 0.3 ms for 1 MiB. None where the same bytes gave as many before.

_GZIP_OR_ZLIB = 47
"""Tells zlib that a header of either kind is there."""

Content: TypeAlias = "bytes | memoryview | pa.Buffer"


def decompress(content: Content, codec: str, num_bytes: int, *, is_proven: bool = False) -> pa.Buffer:
    """The content of one compressed page or buffer.

    Args:
        content: The content of one frame, member or block.
        codec: pyarrow's name of it, as `lz4_raw`.
        num_bytes: What comes out, 0 or more.
        is_proven: These very bytes gave as many before, as a checksum of them tells.

    Raises:
        ValueError: Other than `num_bytes` came out.
        OSError, pyarrow.ArrowException: The content is damaged or cut short.
    """
    return (_by_codec if is_proven else _EXACT[codec])(content, codec, num_bytes)


def _by_codec(content: Content, codec: str, num_bytes: int) -> pa.Buffer:
    return pa.Codec(codec).decompress(content, num_bytes)


def _by_stated_size(content: Content, codec: str, num_bytes: int) -> pa.Buffer:
    stated, shift = 0, 0
    for byte in bytes(memoryview(content)[:5]):  # a varint of 32 bits
        stated |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if stated != num_bytes:
        raise _other_size(codec, num_bytes, f"states {stated}")
    return _by_codec(content, codec, num_bytes)


def _by_stream(content: Content, codec: str, num_bytes: int) -> pa.Buffer:
    with pa.CompressedInputStream(pa.BufferReader(content), codec) as stream:
        found = stream.read_buffer(num_bytes + 1)
    if len(found) != num_bytes:
        raise _other_size(codec, num_bytes, f"gives {'more' if len(found) > num_bytes else len(found)}")
    return found


def _by_zlib(content: Content, codec: str, num_bytes: int) -> pa.Buffer:
    member = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        found = member.decompress(content, num_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(found) != num_bytes or not member.eof:
        raise _other_size(codec, num_bytes, f"gives {'more' if len(found) > num_bytes else len(found)}")
    return pa.py_buffer(found)


def _by_less_room(content: Content, codec: str, num_bytes: int) -> pa.Buffer:
    found = _by_codec(content, codec, num_bytes)
    if not num_bytes:
        return found
    try:
        _by_codec(content, codec, num_bytes - 1)
    except OSError:
        return found
    raise _other_size(codec, num_bytes, "gives less")


def _other_size(codec: str, num_bytes: int, what: str) -> ValueError:
    return ValueError(f"{codec} of {num_bytes} bytes {what}")


_EXACT: dict[str, Callable[[Content, str, int], pa.Buffer]] = {
    "zstd": _by_codec,
    "snappy": _by_stated_size,
    "gzip": _by_zlib,
    "lz4": _by_stream,
    "brotli": _by_stream,
    "lz4_raw": _by_less_room,
}
