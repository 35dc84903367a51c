"""SIGTERM after a loss, as torchrun sends it: every rank names the lost one, and then ends as the signal means."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.forks import ROOT
from tests.support.ports import free_port
from tests.support.processes import Child, Processes

pytestmark = pytest.mark.system

START_S = 300.0
END_S = 120.0
PROGRAM = ("-m", "tests.support.abort_rank", "1")


def start(processes: Processes, *behaviours: str, is_quiet: bool = True) -> list[Child]:
    """Ranks that are ready; `is_quiet`: no heartbeat finds a loss before SIGTERM comes."""
    environment = {"QUIET": "1"} if is_quiet else {}
    ranks = processes.start_ranks(*PROGRAM, *behaviours, world_size=len(behaviours), environment=environment)
    for rank in ranks:
        rank.wait_for_line("ready", deadline_s=START_S)
    return ranks


def test_each_rank_names_the_killed_one_although_sigterm_comes_at_once(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ranks = start(processes, "stuck", "idle", "idle", "check")
        ranks[2].send_signal(signal.SIGKILL)
        ranks[2].wait(deadline_s=END_S)
        others = [ranks[0], ranks[1], ranks[3]]
        for rank in others[1:]:
            rank.send_signal(signal.SIGTERM)
        for rank in others[1:]:
            assert rank.wait(deadline_s=END_S) == -signal.SIGTERM, processes.report()
        ranks[0].send_signal(signal.SIGTERM)  # it serves the store, as the launcher does for torchrun
        assert ranks[0].wait(deadline_s=END_S) == -signal.SIGTERM, processes.report()
        for rank in others:
            assert rank.stderr().count("torchmix: rank 2 lost: rank 2 (host ") == 1, processes.report()
            assert "was killed or ended without closing its loader; the last step it delivered was 41" in rank.stderr()


def test_ranks_that_are_told_to_end_together_name_nobody(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ranks = start(processes, "idle", "check", "idle")
        for rank in reversed(ranks):  # the last one serves the store; each finds those before it gone
            rank.send_signal(signal.SIGTERM)
            assert rank.wait(deadline_s=END_S) == -signal.SIGTERM, processes.report()
            assert "lost" not in rank.stderr(), processes.report()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_that_handles_sigterm_does_so_undisturbed(tmp_path: Path, when: str) -> None:
    with Processes(tmp_path) as processes:
        ranks = start(processes, "idle", when, "idle")
        ranks[2].send_signal(signal.SIGKILL)
        ranks[2].wait(deadline_s=END_S)
        ranks[1].send_signal(signal.SIGTERM)
        assert ranks[1].wait(deadline_s=END_S) == 7, processes.report()
        assert "handled" in ranks[1].stdout()
        assert "torchmix: rank 2 lost: " in ranks[1].stderr(), processes.report()


def test_a_fork_that_is_ended_does_not_end_its_rank(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ranks = start(processes, "forks", "close", is_quiet=False)
        processes.wait_all(ranks, deadline_s=END_S)
        assert "fork ended with -15\n" in ranks[0].stdout()


def test_under_torchrun_each_rank_names_the_killed_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-addr", "127.0.0.1"]
    script = str(ROOT / "tests" / "support" / "abort_rank.py")
    with Processes(tmp_path) as processes:
        job = processes.start(
            [*command, "--master-port", str(free_port()), script, "1", "barrier", "dies", "check"],
            environment={"PYTHONPATH": str(ROOT)},
        )
        assert job.wait(deadline_s=START_S) != 0
        for rank in (0, 2):
            assert f"[seen by rank {rank}]" in job.stderr(), processes.report()
        assert job.stderr().count("torchmix: rank 1 lost: rank 1 (host ") == 2, processes.report()
