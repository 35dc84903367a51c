"""CRC-32 of joined parts, against zlib."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from torchmix.formats.decompress import join_checksums


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0), (1, 1), (3, 70_000), (65_536, 65_536), (9, 1_048_577)])
def test_the_checksum_of_two_parts_is_that_of_their_bytes(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(sizes)
    first, second = (rng.integers(0, 256, size, dtype=np.uint8).tobytes() for size in sizes)
    joined = join_checksums(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)
