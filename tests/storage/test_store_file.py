from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from torchmix.errors import SourceChanged, SourceUnreadable
from torchmix.storage.store_file import StoreFile, opened

CONTENT = bytes(range(256)) * 40
URI = "memory://bucket/a.bin"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/a.bin", CONTENT)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    yield system
    system.store.clear()


def fail_first(monkeypatch: pytest.MonkeyPatch, system: Any, times: int, then=lambda: None) -> list[int]:
    """Reads of the store fail at first; `then` is called after each failure."""
    real, starts = type(system).cat_file, list[int]()

    def cat_file(self, path, start=None, end=None, **options):
        starts.append(start)
        if len(starts) <= times:
            then()
            raise TimeoutError("timed out")
        return real(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(system), "cat_file", cat_file)
    return starts


def test_any_range_is_its_bytes(system) -> None:
    file = StoreFile(URI, "here")
    assert file.num_bytes == len(CONTENT)
    for offset, num_bytes in [(0, 10), (100, 5000), (len(CONTENT) - 3, 10), (len(CONTENT), 5), (10**9, 1), (7, 0)]:
        assert file.read(offset, num_bytes) == CONTENT[offset : offset + num_bytes]


def test_a_read_that_fails_is_tried_again(system, monkeypatch, caplog) -> None:
    file = StoreFile(URI, "source 'web': " + URI)
    starts = fail_first(monkeypatch, system, 2)
    assert file.read(10, 20) == CONTENT[10:30] and starts == [10, 10, 10]
    assert caplog.text.count(f"source 'web': {URI}: cannot read bytes [10, 30): timed out; trying again") == 2


def test_an_object_that_is_gone_after_a_failure_is_missing(system, monkeypatch) -> None:
    file = StoreFile(URI, "here")
    fail_first(monkeypatch, system, 1, lambda: system.rm("/bucket/a.bin"))
    with pytest.raises(SourceUnreadable, match=r"cannot read bytes \[0, 5\): there is no such object"):
        file.read(0, 5)


def test_an_object_that_is_another_one_after_a_failure_is_refused_or_asked_about(system, monkeypatch) -> None:
    for on_change in (None, lambda file: None):
        system.pipe_file("/bucket/a.bin", CONTENT)
        file = StoreFile(URI, "here", on_change)
        with monkeypatch.context() as patched:
            fail_first(patched, system, 1, lambda: system.pipe_file("/bucket/a.bin", CONTENT[::-1] + b"more"))
            if on_change is None:
                with pytest.raises(SourceChanged, match="here: it was replaced while it was read"):
                    file.read(0, 5)
            else:
                assert file.read(0, 5) == CONTENT[::-1][:5] and file.num_bytes == len(CONTENT) + 4


def test_a_store_that_gives_too_little_fails(system, monkeypatch) -> None:
    file = StoreFile(URI, "here")
    monkeypatch.setattr(type(system), "cat_file", lambda *_, **__: b"abc")
    with pytest.raises(SourceUnreadable, match="the store gave 3 bytes of 5, 5 times"):
        file.read(0, 5)


def test_threads_share_an_object(system) -> None:
    file, wrong = StoreFile(URI, "here"), list[int]()

    def read(first: int) -> None:
        for offset in range(first, len(CONTENT), 97):
            if file.read(offset, 50) != CONTENT[offset : offset + 50]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_object_that_cannot_be_opened_is_named(system) -> None:
    with (
        pytest.raises(SourceUnreadable, match=r"here: cannot be opened: there is no such object"),
        opened("memory://bucket/none", "here"),
    ):
        pass
    with pytest.raises(SourceUnreadable, match=r"here: cannot be opened: .*is a folder"):
        StoreFile("memory://bucket", "here")
