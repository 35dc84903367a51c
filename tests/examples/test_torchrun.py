"""The elastic example under torchrun, which starts ranks again from the checkpoint: a rank or a machine is lost."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

import torchmix
from tests.support.deadlines import LONG_S
from tests.support.example import EXAMPLE, odd_batch_of_prose
from tests.support.ports import free_port
from tests.support.process_table import running
from tests.support.processes import Child, Processes, wait_until

PROGRAM = str(EXAMPLE.parent / "ddp" / "train_elastic.py")
LINE = re.compile(r"step (\d+) loss \S+ ranks (\d) digest (\w{16})\n")


def steps_of(*outputs: list[tuple[str, str, str]]) -> set[int]:
    """The steps in the agents' lines; one is repeated only if a rank was ended between its line and its checkpoint."""
    each = [[int(step) for step, *_ in lines] for lines in outputs]
    steps = Counter(step for one in each for step in one)
    ends = Counter(step for one in each for step, after in zip(one, [*one[1:], -1], strict=False) if after != step + 1)
    assert steps - Counter([*steps]) <= ends
    return {*steps}


@pytest.mark.examples
@pytest.mark.system
def test_a_killed_rank_costs_no_step_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    recipe = odd_batch_of_prose(tmp_path)
    words = (PROGRAM, str(recipe), "--save", str(tmp_path / "run.pt"))
    launch = ["-m", "torch.distributed.run", "--max-restarts", "2", "--local-addr", "127.0.0.1"]

    def ranks(number: int, steps: int) -> list[str]:
        sizes = ("--nproc-per-node", str(number), "--master-port", str(free_port()))
        return [*launch, *sizes, *words, "--steps", str(steps)]

    with Processes(tmp_path) as processes:
        agent = processes.start_python(*ranks(2, 100_000))

        def await_steps(count: int) -> None:
            wait_until(lambda: len(LINE.findall(agent.stdout())) >= count, deadline_s=LONG_S, what=processes.report)

        def was_told() -> bool:
            return "others of this job have begun with" in agent.stderr()

        await_steps(2)
        while not was_told():  # a mark that meets a save is gone with the file
            count = len(LINE.findall(agent.stdout()))
            os.utime(tmp_path / "run.pt")  # as if others had begun with it
            wait_until(
                lambda count=count: was_told() or len(LINE.findall(agent.stdout())) >= count + 3,
                deadline_s=LONG_S,
                what=processes.report,
            )
        await_steps(len(LINE.findall(agent.stdout())) + 2)
        first = {one.pid for one in running() if one.parent == agent.pid}
        os.kill(max(first), signal.SIGKILL)
        wait_until(
            lambda: not first & {one.pid for one in running() if one.parent == agent.pid},
            deadline_s=LONG_S,
            what=processes.report,
        )
        before = len(LINE.findall(agent.stdout()))
        await_steps(before + 2)
        agent.send_signal(signal.SIGTERM)
        agent.wait(deadline_s=LONG_S)
        lines = LINE.findall(agent.stdout())
        last = int(lines[-1][0]) + 3
        alone = processes.start_python(*ranks(1, last + 1))
        assert alone.wait(deadline_s=LONG_S) == 0, alone.report()
        of_one = LINE.findall(alone.stdout())
    digests = [plan.order_digest.hex() for plan in torchmix.plan(recipe, steps=last + 1)]
    assert lines[before][1] == "2" and {number for _, number, _ in of_one} == {"1"}
    assert all(digest == digests[int(step)] for step, _, digest in (*lines, *of_one))
    assert steps_of(lines, of_one) == {*range(last + 1)}


def kill_with_ranks(agent: Child) -> None:
    """Kill an agent and then its ranks, which are in sessions of their own, as if the machine was lost."""
    ranks = [one.pid for one in running() if one.parent == agent.pid]
    agent.send_signal(signal.SIGKILL)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.examples
@pytest.mark.system
def test_an_agent_is_killed_and_another_takes_its_place_and_no_step_is_another(tmp_path: Path) -> None:
    """The ranks that are left go on in their process, or from the checkpoint if the lost one hosted their store."""
    recipe, port = odd_batch_of_prose(tmp_path), free_port()
    # An agent that is silent for 15 s is taken for lost; a shorter time would let a busy machine form two groups.
    patient = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=15"
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # shared, it tells who comes later no address

    def words(is_host: int) -> list[str]:
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job")
        sizes = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1")
        script = (PROGRAM, str(recipe), "--save", str(tmp_path / "run.pt"), "--steps", "100000")
        conf = f"is_host={is_host},{patient}"
        return ["-m", "torch.distributed.run", *sizes, *meeting, "--rdzv-conf", conf, *script]

    with Processes(tmp_path) as processes:
        stays, dies = (
            processes.start_python(*words(is_host), name=name, environment=environment)
            for is_host, name in ((1, "stays"), (0, "dies"))
        )
        agents = [stays, dies]

        def lines() -> list[tuple[str, str, str]]:
            return [line for agent in agents for line in LINE.findall(agent.stdout())]

        def await_ranks(number: str, *, since: int) -> None:
            wait_until(
                lambda: sum(ranks == number for _, ranks, _ in lines()) >= since + 2,
                deadline_s=LONG_S,
                what=processes.report,
            )

        try:
            await_ranks("2", since=0)
            kill_with_ranks(dies)
            await_ranks("1", since=0)
            before = sum(ranks == "2" for _, ranks, _ in lines())
            agents.append(processes.start_python(*words(0), name="comes", environment=environment))
            await_ranks("2", since=before)
        finally:
            for agent in (stays, *agents[2:]):
                kill_with_ranks(agent)
    steps = steps_of(*(LINE.findall(agent.stdout()) for agent in agents))
    digests = [plan.order_digest.hex() for plan in torchmix.plan(recipe, steps=max(steps) + 1)]
    assert all(digest == digests[int(step)] for step, _, digest in lines())
    assert steps == {*range(max(steps) + 1)}
