from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.catalogs import make_world
from tests.support.deadlines import LONG_S
from tests.support.files import make_tokens_file, random_tokens
from tests.support.indexing import assert_lengths, counts, indexed, names_in, two_files
from tests.support.processes import wait_until
from torchmix.catalog import file_index
from torchmix.catalog.manifest import MANIFEST_NAME
from torchmix.catalog.publish import catalog_lock
from torchmix.errors import CatalogError, CorruptPage, SourceChanged, SourceUnreadable
from torchmix.formats.megatron.source import IndexedSource
from torchmix.formats.parquet.source import ParquetSource
from torchmix.indexing import scan, scan_files
from torchmix.indexing.scan import IndexReport
from torchmix.transform.bytes_tokenizer import BYTES


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    world = two_files(tmp_path)

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with catalog_lock(tmp_path / "catalog"):  # opens a file as well, so it is held before
        monkeypatch.setattr(scan, "catalog_lock", nullcontext)
        monkeypatch.setattr(scan_files.os, "open", refused)
        with pytest.raises(SourceUnreadable, match=r"web/0\.parquet: cannot be opened: Permission denied"):
            indexed(world)


def slow_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, fail) -> None:
    """Scanning the file `name` waits until all other files have been kept, then fails."""
    real = ParquetSource.scan
    others = len(list((tmp_path / "web").iterdir())) - 1

    def scan(self, path, progress=None, bad=None):
        if Path(path).name == name:
            indexes = tmp_path / "catalog" / "files"
            wait_until(lambda: len(list(indexes.glob("*.index"))) == others, deadline_s=30, what="other files scanned")
            fail()
        return real(self, path, progress=progress)

    monkeypatch.setattr(scan_files, "_num_threads", lambda _: 2)
    monkeypatch.setattr(ParquetSource, "scan", scan)


def test_files_that_a_failed_run_has_scanned_are_not_scanned_again(tmp_path):
    world = make_world(tmp_path, {"web": [random_tokens(seed, 30) for seed in range(5)]})

    def fail() -> None:
        raise CorruptPage("a page")

    with pytest.MonkeyPatch.context() as monkeypatch:
        slow_last(monkeypatch, tmp_path, "0.parquet", fail)
        with pytest.raises(CorruptPage):
            indexed(world)
    report = indexed(world)
    assert counts(report) == (1, 4, 0)
    assert_lengths(world)
    assert not (tmp_path / "catalog" / "files").exists()


def test_an_index_of_a_file_that_changed_since_is_not_used(tmp_path):
    world = make_world(tmp_path, {"web": [random_tokens(seed, 30) for seed in range(3)]})

    def fail() -> None:
        raise CorruptPage("a page")

    with pytest.MonkeyPatch.context() as monkeypatch:
        slow_last(monkeypatch, tmp_path, "0.parquet", fail)
        with pytest.raises(CorruptPage):
            indexed(world)
    make_tokens_file(tmp_path / "web" / "1.parquet", [[1, 2, 3]])
    report = indexed(world)
    assert counts(report) == (2, 1, 0)
    assert report.catalog.sources["web"].sizes.tokens[30] == 3
    assert not (tmp_path / "catalog" / "files").exists()


def test_an_interrupt_ends_all_threads_and_loses_no_finished_file(tmp_path):
    world = make_world(tmp_path, {"web": [random_tokens(seed, 30) for seed in range(4)]})

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as monkeypatch:
        slow_last(monkeypatch, tmp_path, "3.parquet", fail)
        with pytest.raises(KeyboardInterrupt):
            indexed(world)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchmix-index")]
    assert counts(indexed(world)) == (1, 3, 0)


def test_the_first_error_ends_the_scans_of_other_threads(tmp_path, monkeypatch):
    world = two_files(tmp_path)
    failed = threading.Event()

    def scan(self, path, progress, bad):
        if Path(path).name == "0.parquet":
            failed.set()
            raise CorruptPage("page 3 of 0.parquet")
        assert failed.wait(LONG_S)
        wait_until(lambda: stopped(progress), deadline_s=30, what="the other scan is told to stop")
        raise AssertionError("progress() must end this scan")

    def stopped(progress) -> bool:
        progress(0)
        return False

    monkeypatch.setattr(ParquetSource, "scan", scan)
    monkeypatch.setattr(scan_files, "_num_threads", lambda _: 2)
    with pytest.raises(CorruptPage, match=r"page 3 of 0\.parquet"):
        indexed(world)


def test_progress_rises_to_the_bytes_of_the_files_to_scan_and_names_them(tmp_path):
    world = two_files(tmp_path)
    calls: list[tuple[int, int, str, str]] = []
    indexed(world, progress=lambda *call: calls.append(call))
    total = sum(path.stat().st_size for path in (tmp_path / "web").iterdir())
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == total and {call[1] for call in calls} == {total}
    assert {call[2:] for call in calls} == {("web", "web/0.parquet"), ("web", "web/1.parquet")}
    calls.clear()
    indexed(world, progress=lambda *call: calls.append(call))
    assert calls == []


def test_a_file_that_is_altered_while_it_is_scanned_is_an_error(tmp_path, monkeypatch):
    world = two_files(tmp_path)
    real = ParquetSource.scan

    def scan(self, path, progress, bad):
        if Path(path).name == "1.parquet":
            make_tokens_file(Path(path), [[1, 2, 3]])
        return real(self, path, progress, bad)

    monkeypatch.setattr(ParquetSource, "scan", scan)
    with pytest.raises(SourceChanged, match=r"web/1\.parquet: it was altered while it was indexed"):
        indexed(world)


def test_an_index_run_waits_for_another(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="torchmix")
    world = two_files(tmp_path)
    reports: list[IndexReport] = []
    with catalog_lock(tmp_path / "catalog"):
        waiting = threading.Thread(target=lambda: reports.append(indexed(world)))
        waiting.start()
        wait_until(lambda: "waiting for process" in caplog.text, deadline_s=30, what="the message of the waiting run")
        assert not (tmp_path / "catalog" / MANIFEST_NAME).exists()
    waiting.join(LONG_S)
    assert counts(reports[0]) == (2, 0, 0)


def test_two_runs_at_once_scan_each_file_once(tmp_path):
    world = make_world(tmp_path, {"web": [random_tokens(seed, 30) for seed in range(6)]})
    reports: list[IndexReport] = []
    threads = [threading.Thread(target=lambda: reports.append(indexed(world))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(counts(report) for report in reports) == [(0, 0, 6), (0, 0, 6), (6, 0, 0)]
    assert len({report.catalog.fingerprint for report in reports}) == 1


def test_a_full_disk_is_an_error_that_names_the_catalog(tmp_path, monkeypatch):
    world = two_files(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_index, "write_arrays", full)
    with pytest.raises(CatalogError, match=f"cannot write the catalog at {tmp_path}/catalog.*No space left"):
        indexed(world)
    assert names_in(tmp_path / "catalog") == {".lock"}


def test_small_datasets_of_megatron_are_scanned_by_one_thread(monkeypatch):
    monkeypatch.setattr(scan_files.os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    dataset = IndexedSource(name="web")
    table = ParquetSource(name="web", column="ids", kind="tokens", tokenizer=BYTES)
    assert scan_files._num_threads([(dataset, "a.bin", 1 << 30)] * 4) == 1
    assert scan_files._num_threads([(dataset, "a.bin", 0)] * scan_files.FEW_FILES) == 1
    for files in (
        [(dataset, "a.bin", 1 << 30)] * 5,
        [(dataset, "a.bin", 0)] * (scan_files.FEW_FILES + 1),
        [(dataset, "a.bin", 0), (table, "a.parquet", 0)],
        [(dataset, "s3://bucket/a.bin", 0)],
    ):
        assert scan_files._num_threads(files) == 12
