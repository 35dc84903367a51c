"""torchrun ends all ranks of the elastic example when one is lost, and starts them again, from the last checkpoint."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

import torchmix
from tests.support.deadlines import LONG_S
from tests.support.example import EXAMPLE, odd_batch_of_prose
from tests.support.ports import free_port
from tests.support.process_table import running
from tests.support.processes import Processes, wait_until

PROGRAM = str(EXAMPLE.parent / "ddp" / "train_elastic.py")
LINE = re.compile(r"step (\d+) loss \S+ ranks (\d) digest (\w{16})\n")


@pytest.mark.examples
@pytest.mark.system
def test_a_killed_rank_costs_no_step_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    recipe = odd_batch_of_prose(tmp_path)
    words = (PROGRAM, str(recipe), "--save", str(tmp_path / "run.pt"))
    launch = ["-m", "torch.distributed.run", "--max-restarts", "1", "--local-addr", "127.0.0.1"]

    def ranks(number: int, steps: int) -> list[str]:
        sizes = ("--nproc-per-node", str(number), "--master-port", str(free_port()))
        return [*launch, *sizes, *words, "--steps", str(steps)]

    with Processes(tmp_path) as processes:
        agent = processes.start_python(*ranks(2, 100_000))

        def await_steps(count: int) -> None:
            wait_until(lambda: len(LINE.findall(agent.stdout())) >= count, deadline_s=LONG_S, what=processes.report)

        await_steps(2)
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
    steps = [int(step) for step, *_ in (*lines, *of_one)]
    assert all(digest == digests[int(step)] for step, _, digest in (*lines, *of_one))
    assert {*steps} == {*range(last + 1)}
    assert len(steps) - len({*steps}) <= 3, "whoever is ended between a line and its checkpoint makes a step again"
