"""Shares that change in the middle of a run: an edited recipe, and a policy that follows the losses.

In: a `Bench`. Out: for each feature a list of what is wrong, as in `features.py`. Must hold: what the model was given
is compared with a loader without Megatron that loads the same edit, or replays the same decisions. Cost: three short
runs, and two of 50 steps together.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from cells import LAYOUT_OF_NAME, SAVE_AT, STEPS, steps_flags
from consumed import planned_edit, planned_samples
from features import PIPELINE, TENSORS, ends_saved
from launch import wait
from matrix import Bench, problems_of_run

REPLICAS = LAYOUT_OF_NAME["DP2"]
POLICY_STEPS, SAVE_EVERY, KILL_AFTER = 50, 10, 25
"""Iterations of the run with a policy, from one checkpoint to the next, and before the kill."""


def edited_recipe(bench: Bench) -> list[str]:
    """A checkpoint continues with other shares and a source more, at another layout, by the word of the refusal."""
    saved = bench.checkpoints("edited")
    run = bench.train("edited before", PIPELINE, [*bench.first_weights, *ends_saved(saved)])
    if not run.is_fine:
        return [run.trouble]
    refused = bench.train("edited refused", TENSORS, ["--load", str(saved)], variant="-edited")
    found = re.search(r"accept_edit='([0-9a-f]{16})'", refused.log)
    if refused.is_fine or found is None:
        return ["the edit was not refused with a word that accepts it", refused.trouble]
    accept = ["--load", str(saved), "--data-accept-edit", found[1]]
    run = bench.train("edited", TENSORS, accept, variant="-edited")
    plan = planned_edit(bench.recipe(), bench.recipe("-edited"), edit_at=SAVE_AT, steps=STEPS)
    return problems_of_run(run, TENSORS, plan, first=SAVE_AT)


def policy(bench: Bench) -> list[str]:
    """ADO decides shares over 50 steps; all ranks are killed on the way, and a run at another layout continues."""
    saved, name = bench.checkpoints("ado"), f"{bench.packing} ado"
    log = bench.recipe("-ado").parent / f"decisions-{bench.packing}"
    save = ["--save", str(saved), "--save-interval", str(SAVE_EVERY)]
    schedule = steps_flags(POLICY_STEPS)
    arguments = bench.arguments(REPLICAS, [*bench.first_weights, *save], variant="-ado", schedule=schedule)
    with bench.runner.started(name, arguments, ranks=REPLICAS.ranks) as processes:
        print(f"{name} ...", flush=True)
        end_s = time.monotonic() + bench.runner.deadline_s
        while KILL_AFTER not in bench.runner.result(name, [None] * REPLICAS.ranks).loss_of_iteration:
            if time.monotonic() > end_s or any(process.poll() is not None for process in processes):
                break
            time.sleep(0.1)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        wait(processes, 10.0)
        killed = bench.runner.result(name, [process.poll() for process in processes])
    if KILL_AFTER not in killed.loss_of_iteration:
        return ["the run ended before it was killed", killed.trouble]
    run = bench.train("ado resumed", TENSORS, ["--load", str(saved)], variant="-ado", schedule=schedule)
    if not run.is_fine:
        return [run.trouble]
    begin = re.search(r"the data begin at step (\d+): continuing", run.log)
    if begin is None or not 0 < int(begin[1]) < POLICY_STEPS:
        return ["the second run did not resume from a checkpoint", run.trouble]
    plan = planned_samples(bench.recipe("-ado"), POLICY_STEPS, decisions=str(log))
    unchanged = planned_samples(bench.recipe(), POLICY_STEPS)
    problems = ["the policy changed nothing"] if plan == unchanged else []
    return [*problems, *branches(log), *problems_of_run(run, TENSORS, plan, first=int(begin[1]))]


def branches(log: Path) -> list[str]:
    """What is wrong with the branches of a log: each start has one."""
    found = len(list(log.glob("*.jsonl")))
    return [] if found == 2 else [f"{log} has {found} branches, and the run was started twice"]


SHARE_FEATURES: dict[str, Callable[[Bench], list[str]]] = {"edited recipe": edited_recipe, "policy": policy}
"""By the name of their line."""
