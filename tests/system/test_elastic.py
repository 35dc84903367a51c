"""A process keeps its loaders and node worker over the end of all process groups in it, as in-process restarts do."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.inprocess_rank import DP, FAULT_IN, hash_of
from tests.support.inprocess_rank import STEPS as STEPS_OF_MEGATRON
from tests.support.loaders import run_job, write_job
from tests.support.processes import Processes, wait_until
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

WORLD_SIZE, STEPS = 2, 2
DEADLINE_S = 120.0


@pytest.mark.system
@pytest.mark.parametrize("how", ["abort", "error"])
def test_loaders_outlive_the_groups_of_their_process(how: str, tmp_path: Path) -> None:
    """`abort`: all groups are destroyed while ranks read ahead; `error`: a rank fails, and the other names it."""
    recipe = write_job(tmp_path)
    expected = run_job(recipe, Topology(), steps=3 * STEPS)[0].digests
    with Processes(tmp_path) as processes:
        ranks = processes.start_ranks(
            "-m", "tests.support.restart_rank", str(recipe), str(STEPS), how, world_size=WORLD_SIZE
        )
        processes.wait_all(ranks, deadline_s=DEADLINE_S)
        found = [rank.stdout().splitlines() for rank in ranks]
    assert found[0][0].startswith("worker ") and {line for line in found[0] if "worker" in line} == {found[0][0]}
    for lines in found:
        assert [line for line in lines if line.startswith("step")] == [
            f"step {step} digest {digest}" for step, digest in enumerate(expected)
        ]
    if how == "error":
        assert sum(line == "lost rank 1" for line in found[0]) == 2


@pytest.mark.system
def test_megatron_trains_again_in_its_processes_with_the_same_loaders_and_worker(tmp_path: Path) -> None:
    """An error calls all ranks back, then one is killed and another process has its place."""
    recipe = write_job(tmp_path / "job", extra="split: [80, 20]\n")
    planned = {part: samples_by_step(recipe, name) for part, name in (("step", "train"), ("validation", "validation"))}
    with Processes(tmp_path) as processes:
        ranks = processes.start_ranks(
            "-m", "tests.support.inprocess_rank", str(recipe), str(tmp_path), world_size=DP + 1
        )

        def have_ended() -> bool:
            codes = [rank.returncode for rank in ranks]
            wanted = (0, -signal.SIGKILL, 0)
            assert all(code in (None, end) for code, end in zip(codes, wanted, strict=True)), processes.report()
            return None not in codes

        wait_until(have_ended, deadline_s=DEADLINE_S, what=processes.report)
        found = [[line.split() for line in rank.stdout().splitlines()] for rank in ranks]
    workers = [words[1:] for words in found[0] if words[0] == "workers"]
    assert len(workers) == 3 and workers[0] == workers[1] == workers[2] and len(workers[0]) == 1
    assert [words[1] for words in found[0] if words[0] == "run"] == ["0", "1"]
    for part, by_step in planned.items():
        for step, expected in enumerate(by_step):
            of_ranks = [[w[2:] for w in lines if w[:2] == [part, str(step)]] for lines in found]
            assert [len(taken) for taken in of_ranks] == ([1, 1, 0] if step < FAULT_IN[-1] else [1, 0, 1])
            assert sorted(sample for taken in of_ranks for samples in taken for sample in samples) == expected


def samples_by_step(recipe: Path, part: str) -> list[list[str]]:
    """Hashes of the samples of each step, sorted, as one rank without Megatron has them."""
    steps: list[list[str]] = [[] for _ in range(STEPS_OF_MEGATRON)]
    with build_loader(recipe, part=part, loaders="in_process", max_steps=STEPS_OF_MEGATRON) as loader:
        for microbatch in loader:
            steps[microbatch.step].append(hash_of(microbatch.tokens_int32))
    return [sorted(step) for step in steps]
