"""A folder of loaders on one node is that of all nodes, as loaders come and go."""

from __future__ import annotations

import pytest

from tests.service.job.test_roster import Store
from tests.support.deadlines import LONG_S
from tests.support.processes import wait_until
from torchmix.errors import RankLost
from torchmix.service.endpoints import NOBODYS_KEY, KeysOfFolders, Registry, registered
from torchmix.service.roster import FolderMirror

FIRST, SECOND = "tcp://10.0.0.1:7", "tcp://10.0.0.2:9"


def test_a_folder_follows_another_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("torchmix.service.roster.LOOK_S", 0.01)
    store = Store()
    here, there = FolderMirror(), FolderMirror()
    try:
        assert here.folder.stat().st_mode & 0o077 == 0
        registry = Registry(here.folder)
        registry.put(FIRST, {"web": 2}, "a" * 40)
        here.tell(store, "roster")
        there.follow(store, "roster", lambda: None)
        assert registered(there.folder) == registered(here.folder) != []
        keys = KeysOfFolders([there.folder])
        assert keys[FIRST] == "a" * 40 and keys.get(SECOND) == NOBODYS_KEY
        registry.put(SECOND, {"web": 1}, "b" * 40)
        registry.put(FIRST, {"web": 1, "code": 1}, "c" * 40)
        wait_until(lambda: len(registered(there.folder)) == 2, deadline_s=LONG_S, what="the second loader")
        wait_until(lambda: keys[FIRST] == "c" * 40, deadline_s=LONG_S, what="the other key")
        registry.remove(FIRST)
        wait_until(lambda: len(registered(there.folder)) == 1, deadline_s=LONG_S, what="the end of the first")
        assert keys[FIRST] == "c" * 40, "a connection that is made again finds the last one"
    finally:
        here.close()
        there.close()
    assert not list(tmp_path.iterdir())


def test_a_lost_rank_ends_the_wait_for_loaders() -> None:
    mirror = FolderMirror()

    def check() -> None:
        raise RankLost("rank 0 is lost", 0)

    with pytest.raises(RankLost, match="rank 0 is lost"):
        mirror.follow(Store(), "roster", check)
    mirror.close()
    assert not mirror.folder.exists()
