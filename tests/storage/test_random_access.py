"""Reading byte ranges: whole, across short reads, and past the end of the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmix.storage.random_access import LocalFile


@pytest.fixture
def file(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    file = LocalFile(tmp_path / "a")
    yield file
    file.close()


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (10, 20), (99, 100), (50, 50)])
def test_a_range_is_its_bytes(file: LocalFile, start: int, stop: int) -> None:
    assert file.read(start, stop - start) == bytes(range(start, stop))


def test_a_range_ends_where_the_file_ends(file: LocalFile) -> None:
    assert file.read(90, 1000) == bytes(range(90, 100))
    assert file.read(100, 10) == b""
    assert file.read(5000, 10) == b""


def test_short_reads_of_the_system_are_continued(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_read = os.pread
    calls = []

    def short_read(descriptor: int, num_bytes: int, offset: int) -> bytes:
        calls.append(offset)
        return whole_read(descriptor, min(num_bytes, 7), offset)

    monkeypatch.setattr(os, "pread", short_read)
    assert file.read(10, 30) == bytes(range(10, 40))
    assert calls == [10, 17, 24, 31, 38]
    assert file.read(95, 30) == bytes(range(95, 100))


def test_the_position_of_the_file_stays(file: LocalFile) -> None:
    os.lseek(file.fileno(), 42, os.SEEK_SET)
    file.read(10, 30)
    assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 42
