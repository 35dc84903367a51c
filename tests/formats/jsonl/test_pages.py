from __future__ import annotations

import json
import random

import pytest

from tests.support.json_lines import frame_of, framed, json_lines, plain_lines
from torchmix.errors import SourceUnreadable
from torchmix.formats.jsonl import lines as jsonl_pages
from torchmix.formats.jsonl.lines import (
    BEGINS_INSIDE,
    ENDS_INSIDE,
    GZIP,
    PLAIN,
    ZSTD,
    LinePage,
    cut_pages,
    is_alone,
    lines_of_page,
)

CODECS = {"": (None, PLAIN), ".gz": ("gzip", GZIP), ".zst": ("zstd", ZSTD)}


def cut(file: bytes, suffix: str = "") -> list[LinePage]:
    codec = CODECS[suffix][0]
    return list(cut_pages(lambda offset, num_bytes: file[offset : offset + num_bytes], codec))


def starts_of_lines(content: bytes) -> list[int]:
    return [0] + [i + 1 for i, byte in enumerate(content[:-1]) if byte == 10] if content else []


def num_rows(lines: bytes) -> int:
    return sum(bool(line.strip()) for line in lines.split(b"\n"))


@pytest.mark.parametrize("page_bytes", [1, 7, 64, 1000, 1 << 16])
@pytest.mark.parametrize("read_bytes", [16, 1 << 20])
def test_plain_pages_are_the_lines_that_begin_in_the_same_bytes(page_bytes, read_bytes, monkeypatch):
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", page_bytes)
    monkeypatch.setattr(jsonl_pages, "READ_BYTES", read_bytes)
    content = json_lines(["x" * (i * i % 97) for i in range(60)], seed=page_bytes)
    pages = cut(content)
    of_cell: dict[int, int] = {}
    for start in starts_of_lines(content):
        of_cell.setdefault(start // page_bytes, start)
    assert [page.offset for page in pages] == list(of_cell.values())
    assert b"".join(page.lines for page in pages) == content
    for page in pages:
        assert page.kind == PLAIN and page.first_byte == page.offset and page.num_bytes == len(page.lines)
        assert lines_of_page(page.lines, PLAIN, num_rows(page.lines)) == page.lines


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("at_lines", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_framed_pages_hold_each_line_once_and_are_read_from_their_bytes(suffix, at_lines, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", rng.choice([1, 50, 700, 5000]))
    content = json_lines(["y" * int(rng.expovariate(0.01)) for _ in range(80)], seed=seed)
    file = framed(content, suffix, mean_bytes=rng.choice([20, 400, 4000]), at_lines=at_lines, seed=seed)
    pages = cut(file, suffix)
    assert b"".join(page.lines for page in pages) == content
    place = 0
    for page in pages:
        assert page.first_byte == place
        place += len(page.lines)
        rows = num_rows(page.lines)
        read = bytes(lines_of_page(file[page.offset : page.offset + page.num_bytes], page.kind, rows))
        assert [json.loads(line) for line in read.split(b"\n") if line.strip()] == [
            json.loads(line) for line in page.lines.split(b"\n") if line.strip()
        ]
        assert is_alone(page.kind) == (page.kind not in (GZIP, ZSTD))
        if at_lines:
            assert page.kind == CODECS[suffix][1]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_a_page_reads_of_frames_that_end_inside_lines(suffix, monkeypatch):
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", 10)
    contents = [b'{"a":1}\n{"b', b'":2}\n{"cccccccccc', b"c" * 30, b'":3}\n', b'{"d":4}\n']
    file = b"".join(frame_of(content, suffix) for content in contents)
    sizes = [len(frame_of(content, suffix)) for content in contents]
    pages = cut(file, suffix)
    base = CODECS[suffix][1]
    assert [(page.lines, page.kind - base) for page in pages] == [
        (b'{"a":1}\n{"b":2}\n', ENDS_INSIDE),
        (b'{"cccccccccc' + b"c" * 30 + b'":3}\n', BEGINS_INSIDE),  # its last frame ends with its last line
        (b'{"d":4}\n', 0),
    ]
    assert [page.num_bytes for page in pages] == [sum(sizes[:2]), sum(sizes[1:4]), sizes[4]]
    assert [page.offset for page in pages] == [0, sizes[0], sum(sizes[:4])]


def test_pages_of_a_compressed_file_gather_small_frames_and_keep_large_ones(monkeypatch):
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", 100)
    line = plain_lines(["0123456789"])
    small = frame_of(line, ".zst")
    large = frame_of(line * 40, ".zst")
    assert len(line) == 23
    pages = cut(small * 8 + large + small, ".zst")
    assert [len(page.lines) // len(line) for page in pages] == [5, 3 + 40, 1]


def test_lines_of_several_pages_are_read_together():
    contents = [plain_lines([str(i)] * 9) for i in range(3)]
    for suffix, (_, codec) in CODECS.items():
        file = b"".join(frame_of(content, suffix) for content in contents)
        assert lines_of_page(file, codec, 27) == b"".join(contents)


@pytest.mark.parametrize("suffix", CODECS)
def test_an_endless_line_is_refused(suffix, monkeypatch):
    monkeypatch.setattr(jsonl_pages, "MOST_LINE_BYTES", 10_000)
    monkeypatch.setattr(jsonl_pages, "READ_BYTES", 1000)
    start, line = b'{"a":1}\n' * 20_000, b'{"a":"' + b"x" * 30_000
    file = b"".join(frame_of(content, suffix) for content in (start[:8000], line, line))
    with pytest.raises(SourceUnreadable, match=r"^a line after byte 8000 of its content has over"):
        cut(file, suffix)
    assert [len(page.lines) for page in cut(frame_of(b'{"a":1}\n' * 1000, suffix), suffix)] == [8000]
