"""Runs of ranks: they end, by themselves or not, and what they leave is read."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from tests.support.example import PRETRAIN_GPT, example_module
from tests.support.processes import wait_until

launch = example_module("launch", PRETRAIN_GPT)
cells = example_module("cells", PRETRAIN_GPT)
matrix = example_module("matrix", PRETRAIN_GPT)

LOG = """\
 [2026-08-22 10:00:00.000000] iteration        1/       6 | consumed samples:            8 | elapsed time per \
iteration (ms): 226.8 | learning rate: 9.1E-04 | global batch size:     8 | lm loss: 6.252041E+00 | loss scale: 1.0 |
 loss by source at iteration 1 | notes 6.1E+00 (256 tokens)
 [2026-08-22 10:00:01.000000] iteration        2/       6 | consumed samples:           16 | elapsed time per \
iteration (ms): 178.3 | learning rate: 8.2E-04 | global batch size:     8 | lm loss: 6.232831E+00 | loss scale: 1.0 |
"""


def run(loss_of_iteration: dict[int, float], exit_codes: tuple[int | None, ...] = (0,), log: str = "") -> object:
    return launch.Run(
        exit_codes=exit_codes,
        logs=(log,) * len(exit_codes),
        records=Path("records"),
        loss_of_iteration=loss_of_iteration,
    )


def test_losses_are_read_from_the_log() -> None:
    assert launch.losses_of(LOG) == {1: 6.252041, 2: 6.232831}


def test_a_run_is_fine_if_all_ranks_ended_well() -> None:
    assert run({}, (0, 0)).is_fine
    assert not run({}, (0, None)).is_fine
    assert not run({}, (0, -9)).is_fine


def test_of_a_failed_run_the_telling_part_of_each_log_is_shown() -> None:
    trouble = run({}, (1, 0), log="much text\nTraceback (most recent call last):\n  the error\n").trouble
    assert trouble.startswith("--- rank 0, exit code 1\nTraceback")
    assert "--- rank 1, exit code 0" in trouble
    assert "much text" not in trouble


def test_losses_are_compared_to_a_tolerance() -> None:
    reference = run({1: 6.0, 2: 5.0, 3: 4.0})
    other = run({1: 6.0 * (1 + 5e-6), 2: 5.0 * (1 + 2e-5)})
    assert matrix.unequal_losses(reference, other, range(1, 4)) == [
        f"iteration 2: {5.0 * (1 + 2e-5)} instead of 5.0",
        "iteration 3: no loss in the log",
    ]


def test_a_layout_is_told_to_megatron_in_its_own_words() -> None:
    layouts = {layout.name: layout for layout in cells.LAYOUTS}
    assert layouts["DP2"].arguments == []
    assert [layout.ranks for layout in cells.LAYOUTS] == [2, 2, 2, 2, 2, 4]
    assert layouts["PP2 x VPP2"].arguments == [
        *("--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "1"),
    ]


@pytest.fixture
def runner(tmp_path: Path) -> object:
    """For scripts that see a stand-in for Megatron, as far as the shims look into it."""
    for module in ("megatron/training/initialize.py", "megatron/core/models/backends.py"):
        path = tmp_path / "checkout" / module
        path.parent.mkdir(parents=True)
        path.write_text("class LocalSpecProvider: ...\n")
    return launch.Runner(
        script=tmp_path / "script.py", checkout=tmp_path / "checkout", folder=tmp_path / "folder", deadline_s=LONG_S
    )


@pytest.fixture
def light_runner(runner: object) -> object:
    """For scripts that only end, or do not: what takes seconds to import is a stand-in, torch as where CUDA is."""
    stand_ins = {
        "torch": "import types\ncuda = types.SimpleNamespace(is_available=lambda: True)\n",
        "cpu_imports": "",
        "cpu_device": "def enabled(): return False\n",
        "record": "def enable(folder): ...\n",
    }
    for name, text in stand_ins.items():
        (runner.checkout / f"{name}.py").write_text(text)
    return runner


def write(runner: object, text: str) -> None:
    head = """
        import os, sys, time
        rank = os.environ["RANK"]
    """
    runner.script.write_text(textwrap.dedent(head) + textwrap.dedent(text))


@pytest.mark.system
def test_ranks_run_the_script_as_main_with_its_arguments(light_runner: object) -> None:
    write(
        light_runner,
        """
        assert __name__ == "__main__"
        import megatron.training.initialize
        print(" iteration 1/ 2 | lm loss: 1.5E+00 | of rank", rank, sys.argv[1:3], os.environ["COLOUR"])
        """,
    )
    done = light_runner.run("some name", ["--seed", "3"], ranks=2, COLOUR="red")
    assert done.exit_codes == (0, 0), done.trouble
    assert [f"of rank {rank} ['--seed', '3'] red" in log for rank, log in enumerate(done.logs)] == [True, True]
    assert done.loss_of_iteration == {1: 1.5}


@pytest.mark.system
def test_the_script_finds_the_shims_and_the_record_in_force(runner: object) -> None:
    write(
        runner,
        """
        import torch
        import torchmix.megatron_adapter as tmx
        assert torch.cuda.is_available()
        assert tmx.get_batch.__module__ == "record"
        """,
    )
    done = runner.run("shims", [], ranks=1)
    assert done.is_fine, done.trouble


@pytest.mark.system
def test_at_the_deadline_each_rank_prints_its_stacks_and_ends(light_runner: object) -> None:
    write(light_runner, "print('it sleeps', flush=True); time.sleep(1000)")
    for deadline_s in (5, 60, 240):
        done = dataclasses.replace(light_runner, deadline_s=deadline_s).run(f"hang {deadline_s}", [], ranks=2)
        # CPython may crash where it dumps the stack of a thread that runs Python code, as imports do.
        if all("it sleeps\n" in log.partition("Timeout (")[0] for log in done.logs):
            break
    assert done.exit_codes == (1, 1)
    assert all("Timeout (" in log and "most recent call first" in log for log in done.logs)
    assert done.trouble.startswith("--- rank 0, exit code 1\nTimeout (")


@pytest.mark.system
def test_ranks_that_do_not_notice_a_failure_are_ended_with_all_they_started(
    light_runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "AFTER_FAILURE_S", 0.5)
    write(
        light_runner,
        """
        import subprocess
        if rank == "0":
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.05)
            sys.exit(3)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(sys.argv[1] + ".part", "w") as file:
            file.write(str(child.pid))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        time.sleep(1000)
        """,
    )
    started = tmp_path / "started"
    done = light_runner.run("failure", [str(started)], ranks=2)
    assert done.exit_codes[0] == 3
    assert done.exit_codes[1] is None
    child = Path("/proc", started.read_text(), "stat")

    def has_ended() -> bool:
        try:
            return child.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(has_ended, deadline_s=LONG_S, what="end of what a rank has started")
