"""Decompression to exactly the stated size: of every codec, and of content that was cut or altered."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from torchmix.formats.decompress import decompress

CODECS = ("zstd", "snappy", "gzip", "lz4", "brotli", "lz4_raw")
DAMAGE = (ValueError, OSError, pa.ArrowException)


def content_of(num_bytes: int) -> bytes:
    """Bytes that compress to about half."""
    return np.random.default_rng(num_bytes).zipf(1.4, num_bytes).clip(0, 255).astype(np.uint8).tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_bytes", [0, 1, 2, 127, 128, 300, 70_000, 300_000])
def test_11_2_only_the_stated_number_of_bytes_comes_out(codec: str, num_bytes: int) -> None:
    content = content_of(num_bytes)
    compressed = pa.Codec(codec).compress(content, asbytes=True)
    for held in (compressed, memoryview(compressed), pa.py_buffer(compressed)):
        assert bytes(decompress(held, codec, num_bytes)) == content
        assert bytes(decompress(held, codec, num_bytes, is_proven=True)) == content
    for other in {num_bytes + 1, num_bytes + 4000, num_bytes - 1, num_bytes // 2} - {num_bytes, -1}:
        with pytest.raises(DAMAGE):
            decompress(compressed, codec, other)


@pytest.mark.parametrize("codec", CODECS)
def test_11_2_damaged_content_never_gives_bytes_that_nothing_was_written_to(codec: str) -> None:
    """A decoder that streams says what came out; for snappy and lz4_raw one is written here."""
    content = content_of(3000)
    compressed = pa.Codec(codec).compress(content, asbytes=True)
    rng = np.random.default_rng(7)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(compressed)
        for place in rng.integers(0, len(damaged), rng.integers(1, 4)):
            damaged[place] = rng.integers(256)
        if rng.random() < 0.3:
            damaged = damaged[: int(rng.integers(1, len(damaged)))]
        try:
            found = bytes(decompress(bytes(damaged), codec, len(content)))
        except DAMAGE:
            outcomes.add("told")
            continue
        outcomes.add("read")
        assert found == whole(bytes(damaged), codec)
    assert "told" in outcomes


def whole(content: bytes, codec: str) -> bytes:
    """All that comes out of some content, by no size that is stated beside it."""
    if codec == "lz4_raw":
        return lz4_block(content)
    if codec == "snappy":
        return snappy_block(content)
    with pa.CompressedInputStream(pa.BufferReader(content), codec) as stream:
        return bytes(stream.read())


def lz4_block(content: bytes) -> bytes:
    """https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md"""
    out, place = bytearray(), 0

    def size(low: int) -> int:
        nonlocal place
        while low >= 15:
            low, place = low + content[place], place + 1
            if content[place - 1] < 255:
                break
        return low

    while place < len(content):
        token = content[place]
        place += 1
        literals = size(token >> 4)
        out += content[place : place + literals]
        place += literals
        if place >= len(content):
            break
        offset = int.from_bytes(content[place : place + 2], "little")
        place += 2
        for _ in range(size(token & 15) + 4):
            out.append(out[-offset])
    return bytes(out)


def snappy_block(content: bytes) -> bytes:
    """https://github.com/google/snappy/blob/main/format_description.txt"""
    place, out = 0, bytearray()
    while content[place] > 127:
        place += 1
    place += 1
    while place < len(content):
        tag, kind = content[place], content[place] & 3
        place += 1
        if kind == 0:
            size, extra = tag >> 2, max(0, (tag >> 2) - 59)
            if extra:
                size = int.from_bytes(content[place : place + extra], "little")
            place += extra
            out += content[place : place + size + 1]
            place += size + 1
            continue
        width = {1: 1, 2: 2, 3: 4}[kind]
        offset = int.from_bytes(content[place : place + width], "little")
        place += width
        if kind == 1:
            offset, size = offset | (tag >> 5) << 8, (tag >> 2 & 7) + 4
        else:
            size = (tag >> 2) + 1
        for _ in range(size):
            out.append(out[-offset])
    return bytes(out)
