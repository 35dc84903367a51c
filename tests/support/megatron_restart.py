"""A program: a job trains by Megatron's schedule, is killed, and goes on at another layout or with another recipe.

    python -m tests.support.megatron_restart RECIPE OUT DEADLINE_S STEPS KILL_AT LAYOUT LAYOUT [RECIPE WORD]

All ranks of the first job are killed once they have done KILL_AT steps; the second one goes on from the last of the
checkpoints, one each 5 steps, and trains to STEPS, with the edited recipe that the word accepts if there is one. Each
of its ranks writes OUT/losses-R.json, what its loss function has seen; the first one OUT/state, the state at the end. A
JSON line says at which step it went on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
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
from torchmix.recipe.load import load_recipe

SAVE_EVERY = 5
START_S = 240.0
NAMES = ("torchmix_state", "torchmix_state_before", "consumed_train_samples")


def train(
    rank: int,
    *,
    port: int,
    recipe: Path,
    out: Path,
    layout: Layout,
    checkpoint: SimpleNamespace | None = None,
    accept_edit: str | None = None,
) -> None:
    """One rank; says in a file which step it has done, and the first one saves."""
    store = start_rank(rank, port, layout.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timedelta(minutes=30))

    def tell(step: int, args: SimpleNamespace) -> None:
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            aside = out / "checkpoint.part"
            aside.write_text(json.dumps({name: getattr(args, name) for name in NAMES}))
            aside.replace(out / "checkpoint")
        (out / f"step-{rank}").write_text(str(step))

    record, args = run_layout(recipe, layout, on_step=tell, checkpoint=checkpoint, accept_edit=accept_edit)
    (out / f"losses-{rank}.json").write_text(json.dumps(record.losses))
    if rank == 0:
        (out / "state").write_text(args.torchmix_state)
    dist.barrier()
    os._exit(0)


def main(
    recipe: Path,
    out: Path,
    deadline_s: float,
    steps: int,
    kill_at: int,
    first: Layout,
    second: Layout,
    edited: Path | None = None,
    word: str | None = None,
) -> int:
    out.mkdir(parents=True)
    with ForkedRanks(
        partial(train, port=free_port(), recipe=recipe, out=out, layout=first),
        world_size=first.world_size,
        folder=out / "first",
    ) as ranks:

        def has_trained() -> bool:
            assert len(ranks.running) == first.world_size, f"a rank ended by itself\n{ranks.report()}"
            found = [out / f"step-{rank}" for rank in ranks.pid_of_rank]
            return all(path.exists() and int(path.read_text() or -1) >= kill_at for path in found)

        wait_until(has_trained, deadline_s=START_S, what="the job is killed")
        for pid in ranks.pid_of_rank.values():
            os.kill(pid, signal.SIGKILL)
        ranks.await_ends(deadline_s=60.0)
    checkpoint = SimpleNamespace(**json.loads((out / "checkpoint").read_text()))
    done = checkpoint.consumed_train_samples // samples_of(recipe)
    rest = layout_of(second.name.replace(f"steps={second.steps}", f"steps={steps - done}"))
    with ForkedRanks(
        partial(
            train,
            port=free_port(),
            recipe=edited or recipe,
            out=out,
            layout=rest,
            checkpoint=checkpoint,
            accept_edit=word,
        ),
        world_size=rest.world_size,
        folder=out / "second",
    ) as ranks:
        ranks.await_ends(deadline_s=deadline_s)
        failed = len(ranks.running) + sum(code != 0 for code in ranks.code_of_rank.values())
        if failed:
            print(ranks.report(), file=sys.stderr, flush=True)
    print(json.dumps({"went_on_at": done}), flush=True)
    return failed


def samples_of(recipe: Path) -> int:
    """Samples of a step."""
    return int(load_recipe(recipe).batch.samples)  # type: ignore[arg-type]


if __name__ == "__main__":
    recipe, out, deadline_s, steps, kill_at, first, second, *edit = sys.argv[1:]
    edited, word = (Path(edit[0]), edit[1]) if edit else (None, None)
    layouts = layout_of(first), layout_of(second)
    sys.exit(main(Path(recipe), Path(out), float(deadline_s), int(steps), int(kill_at), *layouts, edited, word))
