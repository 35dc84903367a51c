from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.catalogs import make_world
from tests.support.files import flip_byte, make_tokens_file, random_tokens
from tests.support.process_table import open_descriptors
from torchmix.errors import SourceChanged, SourceUnreadable
from torchmix.formats.parquet.source import ParquetSource
from torchmix.reader.open_files import RETRY_WAITS_S, Descriptors, OpenFiles

NUM_FILES = 4


@pytest.fixture
def files(tmp_path: Path) -> Iterator[OpenFiles]:
    """Files `web/0.parquet` to `web/3.parquet`, indexed, of which two may be open at once."""
    world = make_world(tmp_path, {"web": [random_tokens(seed, 40) for seed in range(NUM_FILES)]})
    descriptors = Descriptors(most=2)
    source = ParquetSource(name="web", column="input_ids", kind="tokens")
    yield OpenFiles(source, world.index().sources["web"].files, tmp_path, descriptors)
    descriptors.close_all()


def test_any_range_of_any_file_is_read_and_counted(files, tmp_path):
    contents = [(tmp_path / "web" / f"{number}.parquet").read_bytes() for number in range(NUM_FILES)]
    for file, offset, num_bytes in [(0, 4, 100), (3, 0, 4), (0, 50, 1), (2, 7, 900), (1, 4, 0)]:
        assert files.read(file, offset, num_bytes) == contents[file][offset : offset + num_bytes]
    assert files.bytes_read == 100 + 4 + 1 + 900


def test_no_more_files_are_open_than_allowed_and_the_one_used_longest_ago_is_closed(files, monkeypatch):
    opened: list[str] = []
    real = os.open

    def counted(path, *rest, **more) -> int:
        opened.append(Path(path).name[0])
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", counted)
    before = open_descriptors()
    for file in [0, 1, 0, 2, 0, 1, 3, 3]:
        files.read(file, 0, 4)
    assert "".join(opened) == "01213"
    assert len(open_descriptors() - before) == 2


def test_the_footer_is_read_once_while_the_inode_is_unaltered(files, monkeypatch, tmp_path):
    calls: list[str] = []
    real = ParquetSource.fingerprint

    def counted(self, descriptor, path):
        calls.append(Path(path).name)
        return real(self, descriptor, path)

    monkeypatch.setattr(ParquetSource, "fingerprint", counted)
    for file in [0, 1, 2, 0, 1, 2]:
        files.read(file, 0, 4)
    assert calls == ["0.parquet", "1.parquet", "2.parquet"]
    shutil.copy(tmp_path / "web" / "0.parquet", tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / "web" / "0.parquet")  # the same bytes in another inode
    files.read(0, 0, 4)
    assert calls[3:] == ["0.parquet"]


def longer(path: Path) -> None:
    make_tokens_file(path, random_tokens(9, 300))


def other_footer(path: Path) -> None:
    flip_byte(path, path.stat().st_size - 20)


def no_footer(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"XXXX")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (longer, r"has \d+ bytes; it was indexed with \d+ bytes"),
        (other_footer, "has footer hash [0-9a-f]{32}; it was indexed with .* footer hash [0-9a-f]{32}"),
        (no_footer, "has no whole footer"),
        (cut, r"has \d+ bytes"),
    ],
)
def test_a_file_that_changed_since_it_was_indexed_is_not_opened(files, tmp_path, alter: Callable[[Path], None], says):
    alter(tmp_path / "web" / "1.parquet")
    for _ in range(2):
        with pytest.raises(SourceChanged, match=f"source 'web': .*web/1.parquet: it {says}.*run torchmix index"):
            files.read(1, 0, 4)
    files.read(0, 0, 4)
    assert files.bytes_read == 4


def test_a_deleted_file_is_an_error_that_names_it(files, tmp_path):
    (tmp_path / "web" / "1.parquet").unlink()
    with pytest.raises(
        SourceUnreadable,
        match=r"1\.parquet: cannot read 4 bytes at 0: No such file.*deleted or moved since",
    ):
        files.read(1, 0, 4)


def test_a_file_that_may_not_be_read_is_an_error_that_names_it(files, monkeypatch):
    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(SourceUnreadable, match=r"1\.parquet: cannot read 4 bytes at 0: Permission denied; make it"):
        files.read(1, 0, 4)


def test_a_file_that_is_replaced_while_it_is_open_stays_the_indexed_one_with_a_warning(
    files, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("torchmix.reader.open_files.LOOK_S", 0.0)
    path = tmp_path / "web" / "0.parquet"
    content = path.read_bytes()
    files.read(0, 0, 4)
    longer(tmp_path / "new.parquet")
    assert files.read(0, 0, 4) and not caplog.records
    (tmp_path / "new.parquet").replace(path)
    assert files.read(0, 4, 200) == content[4:204] == files.read(0, 4, 200)
    [record] = caplog.records
    assert "0.parquet: another file lies there since this process opened it" in record.getMessage()


def test_a_file_that_is_cut_while_it_is_open_has_changed(files, tmp_path):
    files.read(0, 0, 4)
    os.truncate(tmp_path / "web" / "0.parquet", 50)
    with pytest.raises(SourceChanged, match="ends before byte 104"):
        files.read(0, 4, 100)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_an_error_that_passes_is_tried_again_on_the_file_opened_anew(files, tmp_path, monkeypatch, caplog, code):
    content = (tmp_path / "web" / "0.parquet").read_bytes()
    files.read(0, 0, 4)
    real, left, waits = os.pread, [code, code], []

    def failing(descriptor: int, num_bytes: int, offset: int) -> bytes:
        if left:
            raise OSError(left.pop(), os.strerror(code))
        return real(descriptor, num_bytes, offset)

    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(time, "sleep", waits.append)
    assert files.read(0, 4, 100) == content[4:104]
    assert waits == list(RETRY_WAITS_S[:2])
    assert caplog.text.count("trying again") == 2 and os.strerror(code) in caplog.text


def test_an_error_that_stays_is_named_after_the_last_attempt(files, monkeypatch):
    attempts, waits = [], []

    def failing(descriptor: int, num_bytes: int, offset: int) -> bytes:
        attempts.append(offset)
        raise OSError(errno.EIO, "Input/output error")

    before = open_descriptors()
    files.read(1, 0, 4)
    assert len(open_descriptors() - before) == 1
    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(
        SourceUnreadable, match=r"web/1\.parquet: cannot read 100 bytes at 4: Input/output error, 4 times"
    ):
        files.read(1, 4, 100)
    assert len(attempts) == 4 and waits == list(RETRY_WAITS_S)
    assert open_descriptors() <= before


def test_an_error_that_does_not_pass_is_not_tried_again(files, monkeypatch):
    def failing(descriptor: int, num_bytes: int, offset: int) -> bytes:
        raise OSError(errno.EISDIR, "Is a directory")

    files.read(1, 0, 4)
    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("no wait is due"))
    with pytest.raises(SourceUnreadable, match="Is a directory"):
        files.read(1, 4, 100)
