"""A program: jobs that train by Megatron's pipeline schedule on torchmix's iterators; one rank of each is killed.

    python -m tests.support.megatron_kills RECIPE OUT DEADLINE_S LAYOUT:VICTIM...

A JSON line for each job: layout, victim, exit codes by rank, seconds from the kill to the end of the last other rank,
and which ranks named the victim on stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from tests.support.forked_ranks import ForkedRanks
from tests.support.layouts import Layout, layout_of
from tests.support.megatron_world import run_layout, start_rank
from tests.support.ports import free_port
from tests.support.processes import wait_until

RUNNING_STEP = 2
"""Steps that every rank has done when one is killed."""
START_S = 120.0


def train(rank: int, *, port: int, recipe: Path, out: Path, layout: Layout) -> None:
    """One rank; says in a file which step it has done."""
    store = start_rank(rank, port, layout.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timedelta(minutes=30))

    def tell(step: int, _: SimpleNamespace) -> None:
        (out / f"step-{rank}").write_text(str(step))
        time.sleep(0.02)  # so that steps are not over before they are looked at

    run_layout(recipe, layout, on_step=tell)


def kill_one(recipe: Path, out: Path, layout: Layout, victim: int, deadline_s: float) -> dict[str, object]:
    """Start a job, kill a rank of it, and watch the others end."""
    out.mkdir(parents=True)
    program = partial(train, port=free_port(), recipe=recipe, out=out, layout=layout)
    with ForkedRanks(program, world_size=layout.world_size, folder=out) as ranks:

        def step_of(rank: int) -> int:
            path = out / f"step-{rank}"
            return int(path.read_text() or -1) if path.exists() else -1

        def all_train() -> bool:
            assert len(ranks.running) == layout.world_size, f"a rank ended by itself\n{ranks.report()}"
            return min(step_of(rank) for rank in ranks.pid_of_rank) >= RUNNING_STEP

        wait_until(all_train, deadline_s=START_S, what="all ranks train")
        os.kill(ranks.pid_of_rank[victim], signal.SIGKILL)
        seconds = ranks.await_ends(deadline_s=deadline_s)
        ranks.running  # noqa: B018 - reads the last exit codes
        named = [rank for rank in ranks.pid_of_rank if f"torchmix: rank {victim} lost" in ranks.errors_of(rank)]
        if seconds == float("inf") or len(named) != layout.world_size - 1:
            print(ranks.report(), file=sys.stderr, flush=True)
        codes = [ranks.code_of_rank.get(rank) for rank in ranks.pid_of_rank]
        return {"layout": layout.name, "victim": victim, "codes": codes, "seconds": seconds, "named": named}


if __name__ == "__main__":
    recipe, out, deadline_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    for number, text in enumerate(sys.argv[4:]):
        name, _, victim = text.partition(":")
        facts = kill_one(recipe, out / str(number), layout_of(name), int(victim), deadline_s)
        print(json.dumps(facts), flush=True)
