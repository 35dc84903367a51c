"""CRC-32 of bytes that lie end to end, from the CRC-32 of each part.

In: checksums as zlib's, and sizes. Out: the checksum of the parts together. Must hold: it is what `zlib.crc32` gives of
all the bytes. Cost: some 20 microseconds for parts of a new size, 3 for one that came before; no byte is read again.

A CRC is the remainder of a polynomial over GF(2). Bytes behind it multiply it by a power of x, and add their own
remainder: `crc32_combine` of zlib (https://github.com/madler/zlib/blob/develop/crc32.c) by Mark Adler.
"""

from __future__ import annotations

from functools import lru_cache

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
