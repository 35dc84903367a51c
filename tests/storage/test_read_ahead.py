from __future__ import annotations

import random

import pytest

from torchmix.storage import random_access
from torchmix.storage.random_access import ReadAhead

CONTENT = random.Random(1).randbytes(100_000)


class FakeFile:
    """A file of a store, in memory; says which ranges it was asked for."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []
        self.is_closed = False

    @property
    def num_bytes(self) -> int:
        return len(self.content)

    def read(self, offset: int, num_bytes: int) -> bytes:
        self.asked.append((offset, num_bytes))
        return self.content[offset : offset + num_bytes]

    def will_read(self, offset: int, num_bytes: int) -> None:
        raise AssertionError("hints are for ReadAhead")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_access, "SMALL_BYTES", 100)
    monkeypatch.setattr(random_access, "BLOCK_BYTES", 8000)
    monkeypatch.setattr(random_access, "KEPT_BYTES", 32_000)


def test_any_reads_give_the_bytes_of_the_file() -> None:
    rng = random.Random(2)
    for _ in range(30):
        file = FakeFile()
        ahead = ReadAhead(file)
        offset = 0
        for _ in range(60):
            if rng.random() < 0.3:
                offset = rng.randrange(len(CONTENT) + 100)
            if rng.random() < 0.1:
                ahead.will_read(offset, rng.randrange(40_000))
            num_bytes = rng.choice((1, 10, 300, 9000, 20_000))
            assert ahead.read(offset, num_bytes) == CONTENT[offset : offset + num_bytes]
            offset += num_bytes
        ahead.close()
        assert file.is_closed


def test_a_range_that_was_named_is_read_once_by_blocks_and_not_beyond() -> None:
    file = FakeFile()
    ahead = ReadAhead(file)
    ahead.will_read(10_000, 30_000)
    for offset in range(10_000, 40_000, 500):  # once, and again
        ahead.read(offset, 10)
    for offset in range(10_000, 40_000, 1000):
        ahead.read(offset, 1000)
    ahead.close()
    assert sorted(file.asked) == [(10_000, 8000), (18_000, 8000), (26_000, 8000), (34_000, 6000)]


def test_what_is_not_named_is_read_by_little_until_it_goes_on() -> None:
    file = FakeFile()
    ahead = ReadAhead(file)
    for offset in (50_000, 20_000, 70_000):
        ahead.read(offset, 8)
    assert file.asked == [(50_000, 100), (20_000, 100), (70_000, 100)]
    for offset in range(70_000, 80_000, 10):
        ahead.read(offset, 10)
    assert len(file.asked) < 12
    ahead.close()


def test_the_end_of_a_file_is_one_request() -> None:
    file = FakeFile()
    ahead = ReadAhead(file)
    ahead.read(len(CONTENT) - 8, 8)
    ahead.read(len(CONTENT) - 90, 82)
    assert file.asked == [(len(CONTENT) - 100, 100)]
    small = FakeFile(b"abc")
    assert ReadAhead(small).read(0, 10) == b"abc" and ReadAhead(small).read(3, 10) == b""


def test_an_error_of_a_block_ahead_is_raised_where_the_block_is_read() -> None:
    file = FakeFile()
    real = file.read

    def failing(offset: int, num_bytes: int) -> bytes:
        if offset >= 8000:
            raise OSError("fails")
        return real(offset, num_bytes)

    file.read = failing  # type: ignore[method-assign]
    ahead = ReadAhead(file)
    ahead.will_read(0, 20_000)
    assert ahead.read(0, 8000) == CONTENT[:8000]
    with pytest.raises(OSError, match="fails"):
        ahead.read(7990, 20)
    ahead.close()
