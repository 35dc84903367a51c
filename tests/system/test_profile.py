"""`torchmix profile`: each source in a process of its own, and a file that the partition follows from."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.deadlines import LONG_S
from tests.support.processes import COMMAND_LINE, Processes
from tests.support.projects import make_indexed_project

pytestmark = pytest.mark.system


def test_a_profile_is_measured_written_and_used(tmp_path):
    recipe = make_indexed_project(tmp_path / "job")
    with Processes(tmp_path) as processes:
        child = processes.fork_python(*COMMAND_LINE, "profile", str(recipe), "--json", name="profile")
        assert child.wait(deadline_s=LONG_S) == 0, child.report()
        found = json.loads(child.stdout())
        assert [one["name"] for one in found["sources"]] == ["code", "tiny", "web"]
        assert all(one["tokens"] and one["busy_ns"] for one in found["sources"])
        if sys.platform == "linux":
            assert all(one["state_bytes"] < 1 << 28 for one in found["sources"])
        words = ("plan", str(recipe), "--loaders", "--cpu", "4", "--json")
        child = processes.fork_python(*COMMAND_LINE, *words, name="plan")
        assert child.wait(deadline_s=LONG_S) == 0, child.report()
        loaders = json.loads(child.stdout())["loaders"]
        assert {name for one in loaders for name in one["parts"]} == {"code", "tiny", "web"}


def test_a_source_that_cannot_be_read_is_named_and_nothing_is_written(tmp_path):
    recipe = make_indexed_project(tmp_path / "job")
    (tmp_path / "job" / "code.parquet").unlink()
    with Processes(tmp_path) as processes:
        child = processes.fork_python(*COMMAND_LINE, "profile", str(recipe), name="profile")
        assert child.wait(deadline_s=LONG_S) == 3
        assert "source 'code' cannot be measured: " in child.stderr() and "code.parquet" in child.stderr()
    assert not (tmp_path / "job" / "catalog" / "profile.json").exists()
