"""What dead runs leave is found and removed, and nothing of a live one."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from torchmix.boards.leftovers import YOUNG_S, Leftover, clean, leftovers
from torchmix.parallel.ring import identity_of_this_process


def folders(temporary: Path, *, later_s: float) -> list[Leftover]:
    return [one for one in leftovers(temporary=temporary, now_s=time.time() + later_s) if one.kind == "folder"]


def bound(folder: Path) -> socket.socket:
    folder.mkdir(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "node"))
    listener.listen(1)
    return listener


def test_a_socket_is_left_over_once_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, live = bound(tmp_path / "torchmix-dead"), bound(tmp_path / "torchmix-live")
    (tmp_path / "torchmix-other").mkdir()
    (tmp_path / "torchmix-other" / "notes.txt").write_text("the user's")
    (tmp_path / "torchmix-empty").mkdir()
    dead.close()
    assert folders(tmp_path, later_s=0) == [], "a folder this young may be in the making"
    found = folders(tmp_path, later_s=2 * YOUNG_S)
    assert [Path(one.path).name for one in found] == ["torchmix-dead", "torchmix-empty"]
    assert all(clean(one) for one in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torchmix-live", "torchmix-other"]
    of_live = Leftover(kind="folder", what="", path=str(tmp_path / "torchmix-live"))
    assert not clean(of_live), "it is looked at again"
    live.close()
    assert clean(of_live)


def test_a_process_with_the_number_of_a_dead_one_is_not_ended() -> None:
    assert clean(Leftover(kind="process", what="", pid=os.getpid(), started="earlier"))
    assert identity_of_this_process().started != "earlier"
