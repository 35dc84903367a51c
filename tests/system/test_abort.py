"""A rank that is killed, stopped or failed is named by every other rank, and none is left waiting.

Ranks are started one by one: a launcher would end the others itself. Four ranks are two replicas of two TP ranks, so
ranks 0 and 2 lead, 1 and 3 are peers, and rank 0 also serves the job's store. The others' main threads wait in a
collective of the default group with a timeout of half an hour.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.forks import TORCH
from tests.support.processes import Child, Processes, wait_until

pytestmark = pytest.mark.system

START_S = END_S = 120.0


def start(
    processes: Processes,
    behaviours: list[str],
    *,
    tp: int = 2,
    go: Path | None = None,
    after: tuple[str, ...] = TORCH,
) -> list[Child]:
    """Ranks with these behaviours, when all of them have opened their loader's liveness; `after` as `start_ranks`."""
    environment = {"GO": str(go)} if go is not None else {}
    program = ("-m", "tests.support.abort_rank", str(tp), *behaviours)
    ranks = processes.start_ranks(*program, world_size=len(behaviours), after=after, environment=environment)
    for rank in ranks:
        rank.wait_for_line("ready", deadline_s=START_S)
    return ranks


def assert_all_end_and_name(others: list[Child], lost: str, processes: Processes) -> None:
    wait_until(
        lambda: all(other.returncode is not None for other in others),
        deadline_s=END_S,
        what=lambda: f"end of all other ranks\n{processes.report()}",
    )
    for other in others:
        assert other.returncode != 0, processes.report()
        assert f"torchmix: {lost} lost: {lost} (host " in other.stderr(), processes.report()


@pytest.mark.parametrize("victim", [0, 2, 3], ids=["leader with the store", "leader", "peer"])
def test_a_killed_rank_is_named_by_all_others_although_they_wait_in_a_collective(tmp_path: Path, victim: int) -> None:
    with Processes(tmp_path) as processes:
        ranks = start(processes, ["idle" if rank == victim else "barrier" for rank in range(4)])
        ranks[victim].send_signal(signal.SIGKILL)
        assert_all_end_and_name([rank for rank in ranks if rank is not ranks[victim]], f"rank {victim}", processes)


@pytest.mark.parametrize("victim", [0, 2, 3], ids=["leader with the store", "leader", "peer"])
def test_a_stopped_rank_is_named_by_all_others_and_ends_when_it_goes_on(tmp_path: Path, victim: int) -> None:
    with Processes(tmp_path) as processes:
        ranks = start(processes, ["idle" if rank == victim else "barrier" for rank in range(4)])
        ranks[victim].send_signal(signal.SIGSTOP)
        assert_all_end_and_name([rank for rank in ranks if rank is not ranks[victim]], f"rank {victim}", processes)
        assert ranks[victim].returncode is None
        ranks[victim].send_signal(signal.SIGCONT)
        assert ranks[victim].wait(deadline_s=END_S) != 0


def test_a_rank_that_asks_raises_the_loss(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ranks = start(processes, ["check", "check", "idle"], tp=1)
        ranks[2].send_signal(signal.SIGKILL)
        assert_all_end_and_name(ranks[:2], "rank 2", processes)
        for rank in ranks[:2]:
            assert "torchmix.errors.RankLost: rank 2 (host " in rank.stderr()
            assert "the last step it delivered was 41; restart the job from its last checkpoint" in rank.stderr()


@pytest.mark.parametrize(
    ("behaviour", "culprit", "reason"),
    [
        ("raise", 0, "failed: ValueError: a mistake in the training script"),
        ("raise", 1, "failed: ValueError: a mistake in the training script"),
        ("failed", 1, "failed: KeyError: 'no such shard'"),
        ("leave", 1, "ended without closing its loader"),
    ],
)
def test_a_rank_that_fails_by_itself_is_named_with_its_reason(
    tmp_path: Path, behaviour: str, culprit: int, reason: str
) -> None:
    behaviours = [behaviour if rank == culprit else "barrier" for rank in range(2)]
    after = () if behaviour == "leave" else TORCH  # what an interpreter does at its end is here shown by real ones
    with Processes(tmp_path) as processes:
        ranks = start(processes, behaviours, after=after)
        assert_all_end_and_name(ranks, f"rank {culprit}", processes)
        assert reason in ranks[1 - culprit].stderr(), processes.report()


@pytest.mark.parametrize("first", [0, 1], ids=["the rank with the store", "another"])
def test_ranks_may_close_and_end_one_before_another(tmp_path: Path, first: int) -> None:
    go = tmp_path / "go"
    with Processes(tmp_path) as processes:
        ranks = start(processes, ["close" if rank == first else "close-late" for rank in range(3)], tp=1, go=go)
        ranks[first].wait_for_line("ended", deadline_s=END_S)
        go.touch()
        for rank in ranks:
            assert rank.wait(deadline_s=END_S) == 0, processes.report()
            assert "lost" not in rank.stderr(), processes.report()
