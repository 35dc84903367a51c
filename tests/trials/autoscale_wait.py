"""How long a trainer waits for data while a share rises tenfold: with one loader, and with `autoscale`.

    python -m tests.trials.autoscale_wait --seed 1 --count 2 --out wait.json

In: nothing. Out: for each turn the summed wait of a run with one loader, of one with as many as the profile asks for at
the start, and of one with loaders that are scaled, all started by the job; ratios to the first; and the loaders of each
decision. The source `slow` goes through a map that sleeps 2 ms a row, as one that asks a remote service; its share
rises from 4 % to 40 % in 50 steps and falls back after 20 more; in each second turn it rises from 0.2 %, and only after
the steps that `auto` looks at. The trainer sleeps 100 ms a step, in place of a model. Must hold: all runs get the same
order. A turn that is done is not run again. Cost: two minutes a turn.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.scaled_jobs import decisions_of_log, write_scaled_job
from tests.support.trial import continued, trial_parser
from torchmix.parallel.topology import Topology
from torchmix.service.scale.scaling import SCALING_NAME
from torchmix.stateful.open import build_loader


def waits_of(
    recipe: Path, loaders: dict[str, Any], *, steps: int, samples: int, compute_s: float
) -> tuple[float, str, list[list[Any]]]:
    """Seconds that a trainer waits in all steps but the first, the order digest, and what was decided."""
    wait_s = 0.0
    with (
        tempfile.TemporaryDirectory(prefix="torchmix-wait-") as temporary,
        patch("tempfile.tempdir", temporary),
        build_loader(recipe, topology=Topology(), micro_batch_size=samples, max_steps=steps, loaders=loaders) as loader,
    ):
        batches = iter(loader)
        for step in range(steps):
            began_s = time.monotonic()
            next(batches)
            if step:
                wait_s += time.monotonic() - began_s
            time.sleep(compute_s)
        taken = [one for path in Path(temporary).glob(f"*/{SCALING_NAME}") for one in decisions_of_log(path.parent)]
        return wait_s, loader.order_digest, [[one["step"], one["reason"], len(one["loaders"])] for one in taken]


def try_wait(
    seed: int,
    number: int,
    *,
    steps: int | None = None,
    samples: int = 256,
    rows: int | None = None,
    most: int = 7,
    compute_s: float = 0.1,
    sleep_s: float = 0.002,
) -> dict[str, Any]:
    """One turn: a run with one loader, one with those of the start, and one with loaders that are scaled."""
    is_late = number % 2 == 1
    steps = steps or (280 if is_late else 130)
    found: dict[str, Any] = {"steps": steps, "compute_s": compute_s, "is_late": is_late}
    of_job = {"where": "job", "cpu": most + 1}
    with tempfile.TemporaryDirectory(prefix="torchmix-job-") as name:
        recipe = write_scaled_job(
            Path(name),
            least=1,
            most=most,
            samples=samples,
            sleep_s=sleep_s,
            module=f"wait_map_{seed}_{number}",
            web_ns=300,
            rows=rows or (4_000 if is_late else 20_000),
            is_late=is_late,
        )
        digests = set()
        for what, more in (
            ("fixed", {"processes": 1, "autoscale": None}),
            ("auto", {"processes": "auto", "autoscale": None}),
            ("scaled", {}),
        ):
            wait_s, digest, taken = waits_of(
                recipe, {**of_job, **more}, steps=steps, samples=samples, compute_s=compute_s
            )
            found[f"{what}_wait_s"] = wait_s
            digests.add(digest)
        assert len(digests) == 1, "the order does not depend on loaders"
    found["decisions"] = taken
    for what in ("auto", "scaled"):
        found[f"{what}_ratio"] = found[f"{what}_wait_s"] / max(found["fixed_wait_s"], 1e-9)
    return found


def main() -> None:
    """Run the turns that the file does not have yet."""
    continued(trial_parser(__doc__, count=1).parse_args(), try_wait)


if __name__ == "__main__":
    main()
