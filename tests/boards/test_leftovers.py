"""What dead runs leave is found and removed, and nothing of a live one."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import pytest

from torchmix.boards.find import Leftover, clean, leftovers
from torchmix.boards.socket_folders import socket_folder
from torchmix.parallel.liveness.evidence import identity_of_this_process


def left(temporary: Path) -> list[Leftover]:
    return [one for one in leftovers(temporary=temporary) if one.kind == "folder"]


def bound(folder: Path) -> None:
    """As a process leaves it that was killed while others came to its socket."""
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "node"))


def test_a_folder_is_left_over_once_nobody_holds_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bound(tmp_path / "torchmix-dead0000")
    (tmp_path / "torchmix-other000").mkdir()
    (tmp_path / "torchmix-other000" / "notes.txt").write_text("the user's")
    (tmp_path / "torchmix-empty000").mkdir()
    others = "torchmix-copies-5kwn464r"
    (tmp_path / others).mkdir()  # of somebody who has not yet written into it
    (tmp_path / "torchmix-loaders0").mkdir()
    for name in ("0", "1", "cpu-0-7700.loader", ".cpu-0-7700.71", "scaling.jsonl"):
        (tmp_path / "torchmix-loaders0" / name).touch()
    (tmp_path / "torchmix-link0000").symlink_to(tmp_path / "torchmix-empty000")
    found = left(tmp_path)
    assert [Path(one.path).name for one in found] == ["torchmix-dead0000", "torchmix-empty000", "torchmix-loaders0"]
    assert clean(found[0])
    with socket_folder() as live:
        assert live.stat().st_mode & 0o777 == 0o700
        assert not left(tmp_path), "a run that begins removes what dead ones left"
        assert not clean(Leftover(kind="folder", what="", path=str(live))), "it is looked at again"
        assert not clean(Leftover(kind="folder", what="", path=str(tmp_path / "torchmix-other000")))
        kept = {path.name for path in tmp_path.iterdir()}
        assert kept == {live.name, "torchmix-link0000", "torchmix-other000", others}
    assert not live.exists()


def test_a_folder_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, lock = [], fcntl.flock

    def too_late(descriptor: int, how: int) -> None:
        made.append(descriptor)
        if len(made) == 1:
            [path] = tmp_path.iterdir()
            path.rmdir()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with socket_folder() as folder:
        assert folder.is_dir()
    assert len(made) == 2


def test_a_folder_that_was_removed_before_it_was_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    make = tempfile.mkdtemp

    def taken_once(**words: str) -> str:
        made.append(Path(make(dir=tmp_path, **words)))
        if len(made) == 1:  # by a process that makes a folder of its own at this moment
            made[0].rmdir()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", taken_once)
    with socket_folder() as folder:
        assert made == [made[0], folder] and folder.is_dir()


def test_a_process_with_the_number_of_a_dead_one_is_not_ended() -> None:
    assert clean(Leftover(kind="process", what="", pid=os.getpid(), started="earlier"))
    assert identity_of_this_process().started != "earlier"
