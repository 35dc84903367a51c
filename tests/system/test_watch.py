"""What a killed run leaves behind is found and ended, while a run beside it goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.loaders import write_job
from tests.support.processes import Child, Processes, wait_until
from torchmix.boards.find import board_of, leftovers
from torchmix.cli.main import main

pytestmark = pytest.mark.system
DEADLINE_S = 120.0
TRAIN = """
import sys, time, torchmix
from torchmix.parallel import children
from tests.support.processes import workers_of_this_process
if "dead" in sys.argv:  # as on systems whose kernel does not end a process with its parent
    no_end = "from torchmix.parallel import children; children.end_with_parent = int; from %s"
    children._CODE = children._CODE.replace("from %s", no_end)
with torchmix.build_loader(sys.argv[1], topology=torchmix.Topology(), loaders="node") as loader:
    next(iter(loader))
    print("workers", *workers_of_this_process(), flush=True)
    time.sleep(600)
"""


def start(processes: Processes, job: Path, name: str) -> tuple[Child, int]:
    child = processes.fork_python("-c", TRAIN, str(job), name, name=name)
    line = child.wait_for_line("workers ", deadline_s=DEADLINE_S)
    [worker] = map(int, line.split()[1:])
    wait_until(lambda: board_of(worker) is not None, deadline_s=DEADLINE_S, what="board of the worker")
    return child, worker


def test_a_stopped_worker_of_a_killed_run_is_found_and_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path)

    def found() -> list[int]:
        return [one.pid for one in leftovers(temporary=tmp_path)]

    def doctor(*words: str) -> tuple[int, list[int]]:
        capsys.readouterr()
        code = main(["doctor", "--json", *words])
        removed = json.loads(capsys.readouterr().out)["leftovers"]
        return code, [one["pid"] for one in removed if one["is_removed"] == ("--clean" in words)]

    with Processes(tmp_path) as processes:
        dead, left = start(processes, job, "dead")
        _, live = start(processes, job, "live")
        assert not {left, live} & {*found()}
        os.kill(left, signal.SIGSTOP)
        dead.send_signal(signal.SIGKILL)
        wait_until(lambda: left in found(), deadline_s=DEADLINE_S, what="worker among the leftovers")
        assert live not in found()
        code, named = doctor()
        assert code == 1 and left in named and live not in named
        code, removed = doctor("--clean")
        assert left in removed and live not in removed
        assert board_of(left) is None and board_of(live) is not None
        assert left not in found()
