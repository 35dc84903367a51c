from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from tests.support.files import random_texts
from tests.support.json_lines import frame_of, framed, json_lines, plain_lines
from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.jsonl.frames import LONG_LINES, Frame, codec_of_name, find_frames, reframe


def frames_of(path: Path) -> list[Frame]:
    codec = codec_of_name(path)
    assert codec is not None
    content = path.read_bytes()
    return list(find_frames(lambda offset, num_bytes: content[offset : offset + num_bytes], codec))


@pytest.mark.parametrize("old", ["", ".gz", ".zst"])
@pytest.mark.parametrize("new", [".gz", ".zst"])
def test_the_content_stays_and_frames_end_with_lines(tmp_path, old, new):
    content = json_lines(random_texts(4, 3000), seed=1)
    source, target = tmp_path / f"in{old}", tmp_path / f"out.jsonl{new}"
    source.write_bytes(frame_of(content, old))
    told: list[int] = []
    done = reframe(source, target, frame_bytes=5000, progress=told.append)
    frames = frames_of(target)
    assert b"".join(frame.content for frame in frames) == content
    for frame in frames[:-1]:
        assert frame.content.endswith(b"\n") and frame.content[:-1].rfind(b"\n") < 5000 - 1
        assert len(frame.content) >= 5000
    assert done.num_frames == len(frames) > 20
    assert done.content_bytes == len(content)
    assert (done.read_bytes, done.written_bytes) == (source.stat().st_size, target.stat().st_size)
    assert sum(told) == done.read_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, target.name])


def test_many_frames_and_levels_and_a_plain_target(tmp_path):
    content = plain_lines(random_texts(5, 800))
    source = tmp_path / "in.gz"
    source.write_bytes(framed(content, ".gz", mean_bytes=100, at_lines=False))
    sizes = [
        reframe(source, tmp_path / f"{level}.zst", frame_bytes=20_000, level=level).written_bytes for level in (1, 19)
    ]
    assert sizes[0] > sizes[1]
    assert reframe(tmp_path / "19.zst", tmp_path / "plain.jsonl").num_frames == 0
    assert (tmp_path / "plain.jsonl").read_bytes() == content
    reframe(tmp_path / "1.zst", tmp_path / "again.gz", frame_bytes=20_000)
    assert gzip.decompress((tmp_path / "again.gz").read_bytes()) == content


def test_the_same_file_gives_the_same_bytes(tmp_path):
    (tmp_path / "in").write_bytes(plain_lines(random_texts(6, 500)))
    for name in ("a.gz", "b.gz", "a.zst", "b.zst"):
        reframe(tmp_path / "in", tmp_path / name, frame_bytes=3000)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert (tmp_path / "a.zst").read_bytes() == (tmp_path / "b.zst").read_bytes()


def test_a_line_much_longer_than_a_frame_goes_over_several_frames(tmp_path):
    lines = [b"a" * size + b"\n" for size in (10, 350, 450, 2000, 5)]
    (tmp_path / "in").write_bytes(b"".join(lines))
    reframe(tmp_path / "in", tmp_path / "out.zst", frame_bytes=100)
    sizes = [len(frame.content) for frame in frames_of(tmp_path / "out.zst")]
    assert sizes == [11 + 351, 400, 51 + 349, 400, 400, 400, 400, 58]
    assert max(sizes) == LONG_LINES * 100


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_source_leaves_no_target(tmp_path, suffix):
    content = random.Random(1).randbytes(200_000)
    whole = frame_of(content, suffix)
    for damaged in (whole[:-5], whole[: len(whole) // 2], whole[:1000] + bytes(5) + whole[1005:], whole + b"junk"):
        source = tmp_path / "in"
        source.write_bytes(damaged)
        if suffix == ".zst" and len(damaged) == len(whole):
            continue  # without a checksum the content is other bytes
        with pytest.raises(CorruptPage, match=r"in: cannot be read to its end: .*restore the file"):
            reframe(source, tmp_path / "out.zst", frame_bytes=1000)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_files_that_are_missing_there_or_in_the_way_are_named(tmp_path):
    with pytest.raises(CorruptPage, match="in: cannot be read to its end: No such file"):
        reframe(tmp_path / "in", tmp_path / "out.gz")
    (tmp_path / "in").write_bytes(b"{}\n")
    (tmp_path / "out.gz").write_bytes(b"dear")
    with pytest.raises(SourceUnreadable, match=r"out\.gz exists; name another file"):
        reframe(tmp_path / "in", tmp_path / "out.gz")
    assert (tmp_path / "out.gz").read_bytes() == b"dear"
    with pytest.raises(SourceUnreadable, match=r"out\.gz: cannot be written: No such file"):
        reframe(tmp_path / "in", tmp_path / "no folder" / "out.gz")
    with pytest.raises(ValueError, match="frames of 0 bytes"):
        reframe(tmp_path / "in", tmp_path / "new.gz", frame_bytes=0)


def test_an_empty_file_stays_empty(tmp_path):
    (tmp_path / "in").write_bytes(b"")
    done = reframe(tmp_path / "in", tmp_path / "out.zst")
    assert (done.num_frames, done.written_bytes) == (0, 0)


def test_what_a_frame_decompresses_to_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("torchmix.formats.jsonl.frames._compress", lambda content, *_: frame_of(content[::-1], ".gz"))
    (tmp_path / "in").write_bytes(b'{"a":1}\n')
    with pytest.raises(CorruptPage, match=r"out\.gz: frame 0 does not decompress to what went into it"):
        reframe(tmp_path / "in", tmp_path / "out.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
