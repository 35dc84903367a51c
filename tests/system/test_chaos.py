"""Real processes in which something is wrong: each says what it is, none waits for ever, nothing is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.loaders import run_job, write_job
from tests.support.processes import Child, Processes, wait_until
from torchmix.parallel.topology import Topology

pytestmark = pytest.mark.system

START_S = END_S = 120.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def start_alone(processes: Processes, job: Path, loaders: str, how: str, *, is_fork: bool = True) -> Child:
    start = processes.fork_python if is_fork else processes.start_python
    return start("-m", "tests.support.lone_loader", str(job), loaders, how)


def start_ranks(processes: Processes, job: Path, chaos: str, *, world_size: int) -> list[Child]:
    return processes.start_ranks("-m", "tests.support.chaos_rank", str(job), chaos, world_size=world_size)


@pytest.mark.parametrize("loaders", ["in_process", "node"])
@pytest.mark.parametrize(("how", "code"), [("leave", 0), ("raise", 1)])
def test_a_script_that_does_not_close_ends_with_its_own_exit_code(
    job: Path, tmp_path: Path, loaders: str, how: str, code: int
) -> None:
    with Processes(tmp_path) as processes:
        # What an interpreter does at its end is shown by one that was started as one, and by forks.
        child = start_alone(processes, job, loaders, how, is_fork=(loaders, how) != ("node", "leave"))
        assert child.wait(deadline_s=START_S) == code, child.report()
        assert ("ValueError: a mistake" in child.stderr()) == bool(code), child.report()
        assert "terminate called" not in child.stderr()


def test_a_generator_that_is_left_inside_of_a_with_does_not_trouble_the_end(job: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = start_alone(processes, job, "in_process", "suspend", is_fork=False)
        assert child.wait(deadline_s=START_S) == 0, child.report()
        assert child.stderr() == ""


@pytest.mark.parametrize("loaders", ["in_process", "node"])
def test_a_fork_that_ends_as_a_script_does_leaves_its_parents_loader_alone(
    job: Path, tmp_path: Path, loaders: str
) -> None:
    with Processes(tmp_path) as processes:
        child = start_alone(processes, job, loaders, "fork-exit", is_fork=False)
        assert child.wait(deadline_s=START_S) == 0, child.report()
        assert child.stderr() == ""


@pytest.mark.parametrize(("loaders", "is_stopped"), [("in_process", False), ("node", False), ("node", True)])
def test_an_interrupt_ends_the_process_and_its_worker(
    job: Path, tmp_path: Path, loaders: str, is_stopped: bool
) -> None:
    with Processes(tmp_path) as processes:
        child = start_alone(processes, job, loaders, "train")
        child.wait_for_line("ready", deadline_s=START_S)
        if is_stopped:
            [worker] = set(child.session) - {child.pid}
            os.kill(worker, signal.SIGSTOP)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does
        assert child.wait(deadline_s=END_S) == -signal.SIGINT, child.report()
        assert "KeyboardInterrupt" in child.stderr()
        assert child.stderr().count("Traceback (most recent call last)") == 1, "the worker says nothing of it"
        wait_until(lambda: not child.session, deadline_s=END_S, what="end of the worker")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_worker_of_a_killed_process_ends(job: Path, tmp_path: Path, is_stopped: bool) -> None:
    """Also one that is stopped, and so cannot see that nobody is there."""
    with Processes(tmp_path) as processes:
        child = start_alone(processes, job, "node", "train")
        child.wait_for_line("ready", deadline_s=START_S)
        [worker] = set(child.session) - {child.pid}
        if is_stopped:
            os.kill(worker, signal.SIGSTOP)
        child.send_signal(signal.SIGKILL)
        wait_until(lambda: not child.session, deadline_s=END_S, what="end of the worker")


def test_the_worker_of_a_killed_process_ends_also_where_a_fork_of_it_lives_on(job: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = start_alone(processes, job, "node", "fork")
        child.wait_for_line("ready", deadline_s=START_S)
        fork = int(child.stdout().split()[0])  # it holds its parent's end of the channel

        def worker_lives() -> bool:
            return any("worker.main" in line for line in child.session.values())

        assert worker_lives()
        child.send_signal(signal.SIGKILL)
        wait_until(lambda: not worker_lives(), deadline_s=END_S, what="end of the worker")
        os.kill(fork, signal.SIGKILL)


def test_workers_that_are_killed_one_after_the_other_are_told_with_the_signal(job: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = start_alone(processes, job, "node", "lose")
        assert child.wait(deadline_s=START_S) == 1, child.report()
        named = r"WorkerLost: the worker process \d+, .* was ended by signal SIGKILL.* the third of this node in \d+ s"
        assert re.search(named, child.stderr()), child.report()
        wait_until(lambda: not child.session, deadline_s=END_S, what="end of all it has started")


def assert_both_end_and_name(ranks: list[Child], reason: str) -> None:
    for rank in ranks:
        assert rank.wait(deadline_s=START_S) != 0, rank.report()
        assert "end\n" not in rank.stdout(), "an error is no end of the data"
    assert "torchmix: rank 1 lost: rank 1 (host " in ranks[0].stderr(), ranks[0].report()
    assert reason in ranks[0].stderr(), ranks[0].report()


def test_a_rank_with_other_sizes_is_told_both(job: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ranks = start_ranks(processes, job, "other-sizes", world_size=2)
        assert_both_end_and_name(ranks, "micro_batch_size 2, rank 0 1. Give all ranks the same")


def test_a_rank_that_fails_before_it_watches_others_is_named(job: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ranks = start_ranks(processes, job, "no-recipe", world_size=2)
        for rank in ranks:
            assert rank.wait(deadline_s=START_S) == 1, rank.report()
        named = "RankLost: rank 1 failed before the loaders were built: RecipeError: cannot read"
        assert named in ranks[0].stderr(), ranks[0].report()


def test_a_rank_that_dies_while_groups_are_made_is_named(job: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ranks = start_ranks(processes, job, "dies-early", world_size=2)
        assert_both_end_and_name(ranks, "was killed or ended without closing its loader")


def test_a_leader_that_cannot_read_a_step_is_named_after_the_steps_before_it(job: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ranks = start_ranks(processes, job, "bad-step", world_size=2)
        assert_both_end_and_name(ranks, "CorruptPage: page 7 does not decode")
        assert [len(re.findall("^step ", rank.stdout(), re.M)) for rank in ranks] == [3, 3]


def test_forks_of_ranks_that_end_leave_the_job_alone(job: Path, tmp_path: Path) -> None:
    digests = run_job(job, Topology(), steps=40, keep=False)[0].digests
    with Processes(tmp_path) as processes:
        ranks = start_ranks(processes, job, "forks", world_size=2)
        for rank in ranks:
            assert rank.wait(deadline_s=START_S) == 0, processes.report()
            assert re.findall(r"digest (\w+)", rank.stdout()) == digests, rank.report()
            assert rank.stdout().endswith("done\n")


def test_two_loaders_share_a_job_whose_default_group_is_bound_to_a_device(job: Path, tmp_path: Path) -> None:
    digests = run_job(job, Topology(), steps=4, keep=False)[0].digests
    with Processes(tmp_path) as processes:
        ranks = start_ranks(processes, job, "two-loaders", world_size=3)
        for rank in ranks:
            assert rank.wait(deadline_s=START_S) == 0, processes.report()
            found = [digests.index(digest) for digest in re.findall(r"digest (\w+)", rank.stdout())]
            assert found == [0, 1, 0, 1, 2, 3, 0, 1], rank.report()
