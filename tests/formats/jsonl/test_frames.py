from __future__ import annotations

import gzip
import random
import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.json_lines import SKIPPABLE_FRAME, frame_of, framed
from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.jsonl import frames
from torchmix.formats.jsonl.frames import Frame, codec_of_name, decompress, find_frames, zstd_frame_bytes


def found(content: bytes, suffix: str) -> list[Frame]:
    codec = codec_of_name(Path(f"x{suffix}"))
    assert codec is not None
    return list(find_frames(lambda offset, num_bytes: content[offset : offset + num_bytes], codec))


def random_content(seed: int, num_bytes: int) -> bytes:
    rng = random.Random(seed)
    return bytes(rng.choices(b"abcdefgh\n", k=num_bytes // 2)) + rng.randbytes(num_bytes - num_bytes // 2)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("mean_bytes", [3, 500, 9_000])
def test_frames_tile_the_file_and_hold_its_content(suffix, mean_bytes, monkeypatch):
    monkeypatch.setattr(frames, "READ_BYTES", 2048)  # so that a frame is seldom whole at first
    content = random_content(mean_bytes, 30 * mean_bytes)
    file = framed(content, suffix, mean_bytes=mean_bytes, at_lines=False)
    parts = found(file, suffix)
    ends = [frame.offset + frame.num_bytes for frame in parts]
    assert [frame.offset for frame in parts] == [0, *ends[:-1]] and ends[-1] == len(file)
    assert b"".join(frame.content for frame in parts) == content
    some = file[parts[1].offset : ends[3]]
    expected = b"".join(frame.content for frame in parts[1:4])
    assert decompress(some, "gzip" if suffix == ".gz" else "zstd", len(expected)) == expected
    with pytest.raises(ValueError, match="more than"):
        decompress(some, "gzip" if suffix == ".gz" else "zstd", len(expected) - 1)


def test_zstd_frames_of_every_shape_of_header_are_measured():
    rng = random.Random(3)
    shapes = set()
    for num_bytes in [0, 1, 255, 256, 65_000, 70_000, 200_000, 400_000]:
        for content in (rng.randbytes(num_bytes), b"a" * num_bytes, random_content(num_bytes, num_bytes)):
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as writer:  # which does not know the size
                writer.write(content)
            for frame in (frame_of(content, ".zst"), sink.getvalue().to_pybytes()):
                if frame:
                    shapes.add(frame[4])
                    assert zstd_frame_bytes(frame + b"more") == len(frame)
                    with pytest.raises(EOFError):
                        zstd_frame_bytes(frame[:-1])
    assert len(shapes) >= 4
    assert zstd_frame_bytes(SKIPPABLE_FRAME + b"x") == len(SKIPPABLE_FRAME)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_large_frame_is_refused_with_the_command_before_it_is_held(suffix, monkeypatch):
    monkeypatch.setattr(frames, "MOST_FRAME_BYTES", 1 << 18)
    monkeypatch.setattr(frames, "READ_BYTES", 4096)
    for content in (b"\0" * (1 << 20), random_content(1, 1 << 20)):  # one that is small in the file, one that is not
        small = frame_of(b"a\n", suffix)
        with pytest.raises(
            SourceUnreadable, match=f"frame at byte {len(small)} holds more than 0.25 MiB.*torchmix reframe"
        ):
            found(small + frame_of(content, suffix), suffix)
    just = b"\0" * (1 << 18)
    assert [frame.content for frame in found(frame_of(just, suffix), suffix)] == [just]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_is_cut_short_damaged_or_not_compressed_is_named(suffix):
    first, second = frame_of(b"one\n" * 50, suffix), frame_of(random_content(5, 5000), suffix)
    for cut in range(1, len(second), 251):
        with pytest.raises(CorruptPage, match=f"^no whole .* frame at byte {len(first)}: the file ends within"):
            found(first + second[:cut], suffix)
    for junk in (b"x", b"{}\n", b"\0\0\0\0\0"):
        with pytest.raises(CorruptPage, match=f"at byte {len(first)}"):
            found(first + junk, suffix)
    assert found(b"", suffix) == []


def test_every_flipped_byte_of_a_gzip_member_is_noticed_or_harmless():
    content = random_content(6, 300)
    member = gzip.compress(content, mtime=0)
    for i in range(len(member)):
        damaged = bytearray(member)
        damaged[i] ^= 0x10
        try:
            assert b"".join(frame.content for frame in found(bytes(damaged), ".gz")) == content
        except CorruptPage:
            continue
        assert i < 10, "only the header's time, system and flags may differ"


def test_a_member_with_name_and_comment_and_extra_fields_is_read():
    # as bgzip and pigz write them: FEXTRA, FNAME, FCOMMENT
    raw = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = raw.compress(b"hello\n") + raw.flush()
    trailer = zlib.crc32(b"hello\n").to_bytes(4, "little") + (6).to_bytes(4, "little")
    member = b"\x1f\x8b\x08\x1c\0\0\0\0\0\xff" + b"\x04\0" + b"BC\0\0" + b"name\0" + b"why\0" + body + trailer
    assert [frame.content for frame in found(member * 3, ".gz")] == [b"hello\n"] * 3
