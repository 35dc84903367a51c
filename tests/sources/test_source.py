"""Reading byte ranges: whole, across short reads, and past the end of the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmix.sources.source import read_range


@pytest.fixture
def file_descriptor(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    file_descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    yield file_descriptor
    os.close(file_descriptor)


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (10, 20), (99, 100), (50, 50)])
def test_a_range_is_its_bytes(file_descriptor: int, start: int, stop: int) -> None:
    assert read_range(file_descriptor, start, stop - start) == bytes(range(start, stop))


def test_a_range_ends_where_the_file_ends(file_descriptor: int) -> None:
    assert read_range(file_descriptor, 90, 1000) == bytes(range(90, 100))
    assert read_range(file_descriptor, 100, 10) == b""
    assert read_range(file_descriptor, 5000, 10) == b""


def test_short_reads_of_the_system_are_continued(file_descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_read = os.pread
    calls = []

    def short_read(file_descriptor: int, num_bytes: int, offset: int) -> bytes:
        calls.append(offset)
        return whole_read(file_descriptor, min(num_bytes, 7), offset)

    monkeypatch.setattr(os, "pread", short_read)
    assert read_range(file_descriptor, 10, 30) == bytes(range(10, 40))
    assert calls == [10, 17, 24, 31, 38]
    assert read_range(file_descriptor, 95, 30) == bytes(range(95, 100))


def test_the_position_of_the_file_stays(file_descriptor: int) -> None:
    os.lseek(file_descriptor, 42, os.SEEK_SET)
    read_range(file_descriptor, 10, 30)
    assert os.lseek(file_descriptor, 0, os.SEEK_CUR) == 42
