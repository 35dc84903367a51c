"""A real process of a job that Megatron trains again and again in the same processes.

    python -m tests.support.inprocess_rank RECIPE OUT

There are three processes: two have ranks, and one is in reserve, as with `--inprocess-restart`. Each run goes on
from the last checkpoint, OUT/checkpoint, one each two steps; behind the step of a checkpoint something fails:

    run 0    both ranks raise an error inside step 2, as ranks do that are called back because of another one's
    run 1    the process of rank 1 is killed inside step 4, and the other rank waits for it
    run 2    the process in reserve has rank 1, and the run ends with step 5

A rank prints `step S TOKENS` for each step of training, `validation S TOKENS` for what it evaluates behind it, with a
hash of each sample, and which workers this process has.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.support.fake_megatron import default_args, installed, script_of
from tests.support.processes import workers_of_this_process
from torchmix import megatron_adapter as tmx
from torchmix.errors import RankLost
from torchmix.recipe.load import load_recipe

DP, STEPS, SAVE_EVERY = 2, 6, 2
FAULT_IN = (2, 4)
"""The step in which something fails, by run."""
NAMES = ("torchmix_state", "torchmix_state_before", "consumed_train_samples", "consumed_valid_samples")


class Called(RuntimeError):
    """Stands for what the wrapper of in-process restarts raises in the thread that trains."""


def main(recipe: Path, out: Path) -> None:
    """One process, from run to run."""
    number = int(os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=number == 0, wait_for_workers=False)
    ranks_of_run = ({0: 0, 1: 1}, {0: 0, 1: 1}, {0: 0, 2: 1})
    for run, rank_of in enumerate(ranks_of_run):
        if number not in rank_of:
            continue
        store.wait([f"begin {run}"]) if number else store.set(f"begin {run}", "")
        try:
            train(recipe, out, run, rank_of[number], dist.PrefixStore(str(run), store))
        except (RuntimeError, RankLost) as error:  # torch's own errors are RuntimeErrors
            print(f"run {run} {type(error).__name__}", flush=True)
        dist.destroy_process_group()
    tmx.close()
    store.set(f"ended {number}", "")
    if number == 0:
        store.wait(["ended 2"])


def train(recipe: Path, out: Path, run: int, rank: int, store: dist.Store) -> None:
    """One run of Megatron's training, from the last checkpoint on."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=DP)
    samples, length = int(load_recipe(recipe).batch.samples), load_recipe(recipe).batch.length  # type: ignore[arg-type]
    file = out / "checkpoint"
    saved = SimpleNamespace(**json.loads(file.read_text())) if file.exists() else None
    args = default_args(
        data_recipe=str(recipe),
        data_loaders="node",
        inprocess_restart=True,
        data_parallel_size=DP,
        global_batch_size=samples,
        seq_length=length,
        eval_iters=1,
        load=str(out),
    )
    with installed(args, core=True) as modules:
        state = modules["megatron.core.parallel_state"]
        state.get_data_parallel_world_size, state.get_data_parallel_rank = lambda: DP, lambda: rank
        modules["megatron.core.num_microbatches_calculator"].get_num_microbatches = lambda: samples // DP
        tmx.get_batch(script_of("0.16"))
        if saved is not None:
            modules["megatron.training.checkpointing"].check_checkpoint_args(saved)
            args.consumed_train_samples = saved.consumed_train_samples
            args.consumed_valid_samples = saved.consumed_valid_samples
        iterator, validation, _ = tmx.provider()
        print("workers", *workers_of_this_process(), flush=True)
        for step in range(args.consumed_train_samples // samples, STEPS):
            if run < len(FAULT_IN) and step == FAULT_IN[run]:
                fail(iterator, run, rank)
            for part, source in (("step", iterator), ("validation", validation)):
                hashes = [hash_of(next(source)["tokens"]) for _ in range(samples // DP)]
                print(part, step, *hashes, flush=True)
            args.consumed_train_samples += samples
            args.consumed_valid_samples += samples
            dist.barrier()
            if rank == 0 and (step + 1) % SAVE_EVERY == 0:
                file.write_text(json.dumps({name: getattr(args, name) for name in NAMES}))
            dist.barrier()


def fail(iterator: Any, run: int, rank: int) -> None:
    """Fail inside the step that comes next."""
    next(iterator)
    if run == 0:
        raise Called
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hash_of(tokens: torch.Tensor) -> str:
    """The head of a hash of the tokens of a sample."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:12]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
