"""A rank that is killed while Megatron's schedule runs is named by all others, which end; scripts that end, end; a
signal that asks a job to save does not take its data away.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forks import MEGATRON
from tests.support.layouts import SAMPLES, write_bytes_job
from tests.support.processes import Processes

pytestmark = pytest.mark.system

END_S = 120.0

BY_TENSORS = "tp=2,pp=2,steps=100000"
BY_REPLICAS = "pp=2,dp=2,steps=100000"
JOBS = {
    "leader, first stage, host of the store": f"{BY_TENSORS}:0",
    "peer, first stage": f"{BY_TENSORS}:1",
    "peer, last stage": f"{BY_TENSORS}:3",
    "leader of the second replica": f"{BY_REPLICAS}:1",
}


def test_a_killed_rank_is_named_by_all_others(tmp_path: Path) -> None:
    recipe = write_bytes_job(tmp_path / "job", boundaries="document")
    with Processes(tmp_path) as processes:
        child = processes.fork_python(
            "-m",
            "tests.support.megatron_kills",
            str(recipe),
            str(tmp_path / "out"),
            str(END_S),
            *JOBS.values(),
            after=MEGATRON,
        )
        assert child.wait(deadline_s=len(JOBS) * 180.0) == 0, child.report()
        jobs = [json.loads(line) for line in child.stdout().splitlines()]
        assert len(jobs) == len(JOBS)
        for who, job in zip(JOBS, jobs, strict=True):
            others = [rank for rank in range(4) if rank != job["victim"]]
            assert job["codes"][job["victim"]] == -9, who
            assert all(job["codes"][rank] not in (0, None) for rank in others), f"{who}: {job}\n{child.report()}"
            assert job["named"] == others, f"{who}: {job}\n{child.report()}"


LEAVES = """
import sys
from tests.support.fake_megatron import installed, default_args
import torch.distributed as dist
from torchmix import megatron_adapter as tmx
args = default_args(data_recipe=sys.argv[1], data_loaders=sys.argv[2], global_batch_size=8)
with installed(args, core=True):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train, _, _ = tmx.provider()
    next(train)
    if sys.argv[3] == "raise":
        raise ValueError("a mistake in the script")
    sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(("loaders", "how"), [("node", "0"), ("node", "raise"), ("in_process", "3")])
def test_a_script_that_ends_in_the_middle_ends(tmp_path: Path, loaders: str, how: str) -> None:
    recipe = write_bytes_job(tmp_path / "job", boundaries="document")
    with Processes(tmp_path) as processes:
        child = processes.fork_python("-c", LEAVES, str(recipe), loaders, how)
        assert child.wait(deadline_s=120) == (1 if how == "raise" else int(how)), child.report()
        assert ("a mistake in the script" in child.stderr()) == (how == "raise")


SIGNALLED = """
import os, signal, sys
from tests.support.processes import workers_of_this_process
from tests.support.fake_megatron import installed, default_args
import torch.distributed as dist
from torchmix import megatron_adapter as tmx
sizes = {"global_batch_size": int(sys.argv[2]), "data_loaders": "node"}
args = default_args(data_recipe=sys.argv[1], exit_signal_handler=True, **sizes)
with installed(args, core=True):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train, _, _ = tmx.provider()
    next(train)
    (worker,) = workers_of_this_process()
    os.kill(worker, signal.SIGTERM)
    for step in range(10):
        if step:
            next(train)
        for _ in range(args.global_batch_size - 1):
            next(train)
        args.consumed_train_samples += args.global_batch_size
    print("worker", worker in workers_of_this_process())
"""


def test_a_worker_outlives_the_signal_after_which_megatron_saves(tmp_path: Path) -> None:
    recipe = write_bytes_job(tmp_path / "job", boundaries="document")
    with Processes(tmp_path) as processes:
        child = processes.fork_python("-c", SIGNALLED, str(recipe), str(SAMPLES))
        assert child.wait(deadline_s=120) == 0, child.report()
        assert "worker True" in child.stdout(), child.report()
