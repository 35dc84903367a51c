"""A test that hangs ends at its deadline, with the stacks of its threads and of what it has started; a step of CI ends
at its own, and nothing that it leaves running holds the output open.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S, descendants_of, stretched
from tests.support.forks import ROOT
from tests.support.process_table import command_of
from tests.support.processes import wait_until

pytestmark = pytest.mark.system

HANGS = """
import threading
from pathlib import Path
from tests.support.processes import Processes

def where_a_thread_hangs():
    threading.Event().wait()

def where_the_test_hangs():
    threading.Event().wait()

def test_before():
    pass

def test_that_hangs(tmp_path):
    threading.Thread(target=where_a_thread_hangs, daemon=True).start()
    child = "import threading; where_a_child_hangs = threading.Event().wait; print('up', flush=True); "
    with Processes(tmp_path) as processes:
        child = processes.fork_python("-c", child + "where_a_child_hangs()", after=("threading",))
        child.wait_for_line("up", deadline_s=600)
        Path("aside").write_text(str(child.pid))
        Path("aside").rename("up")
        where_the_test_hangs()

def test_after():
    pass
"""
CONFTEST = """
import time
from pathlib import Path
from tests.support import deadlines
from tests.support.deadlines import pytest_configure, pytest_runtest_protocol

class FromTheHang(deadlines.TestDeadline):
    # However long it takes until a child is up, one second begins then; and that of no other test.
    def _run(self):
        while not Path("up").exists():
            time.sleep(0.02)
        Path("up").rename("pid")
        self._seconds, self._test = 1, (self._test[0], deadlines.monotonic() + 1)
        super()._run()

deadlines.DEADLINE = FromTheHang(deadlines.TEST_S)
"""


def test_a_test_that_hangs_is_ended_with_all_stacks(tmp_path: Path) -> None:
    """Alone and under xdist, side by side."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = {}
    for workers in (0, 1):
        folder = tmp_path / f"workers-{workers}"
        folder.mkdir()
        (folder / "test_hangs.py").write_text(HANGS)
        (folder / "conftest.py").write_text(CONFTEST)
        words = ["-m", "pytest", "-p", "no:cacheprovider", "-n", str(workers), "--rootdir", ".", "test_hangs.py"]
        with (folder / "output").open("w") as output:
            runs[folder] = subprocess.Popen(
                [sys.executable, *words], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
    statuses = [run.wait(LONG_S) for run in runs.values()]
    for folder, status in zip(runs, statuses, strict=True):
        text = (folder / "output").read_text()
        assert status != 0, text
        assert "test_hangs.py::test_that_hangs has not ended within 1 s. Stacks of process " in text
        assert "in where_the_test_hangs" in text and "in where_a_thread_hangs" in text, text
        pid = (folder / "pid").read_text()
        assert f"Child process {pid}: " in text
        assert 'File "<string>", line 1 in <module>' in text.split(f"Child process {pid}: ")[1], text
        wait_until(
            lambda pid=pid: not Path(f"/proc/{pid}").exists() or pid not in map(str, descendants_of(1)),
            deadline_s=600,
            what="end of the child",
        )
        if folder.name.endswith("1"):
            assert "2 passed" in text and "crashed while running" in text, text


def step(seconds: int, command: str) -> tuple[int, str]:
    """Status and output of a step of CI, read to the end of its pipe."""
    done = subprocess.run(
        [ROOT / ".ci" / "step", str(seconds), "bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG_S,
        check=False,
        env={**os.environ, "CI_ENDS_S": "2"},
    )
    return done.returncode, done.stdout


def test_a_step_of_ci_names_and_ends_what_it_leaves_running() -> None:
    assert step(60, "echo all is well") == (0, "all is well\n")
    assert step(60, "exit 3") == (3, "")
    # In another session and silent; and without the environment by which it would be known.
    status, text = step(60, "setsid sleep 100001 > /dev/null 2>&1 & env -i sleep 100002 & echo done")
    assert status == 1 and text.startswith("done\nleft behind by: bash -c setsid")
    killed = [line.split() for line in text.splitlines() if line.startswith("killed: ")]
    assert sorted(words[2:] for words in killed) == [["sleep", "100001"], ["sleep", "100002"]]
    assert not any(command_of(int(words[1])) for words in killed)


def test_a_step_of_ci_ends_at_its_deadline() -> None:
    status, text = step(1, "sleep 100003; true")
    assert status == 124 and "has not ended within 1 s: bash -c sleep 100003" in text
    assert "sleep 100003" in text.partition("killed: ")[2]


def test_a_deadline_is_stretched_by_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, seconds in [(0.5, 20.0), (2.0, 20.0), (50.0, 500.0)]:
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert stretched(20.0) == seconds
