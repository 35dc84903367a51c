"""How long a trainer waits while a share rises: with one loader, with `auto`, and with `autoscale`, in virtual time.

    python -m tests.trials.autoscale_wait --seed 1 --count 40 --out wait.json

In: nothing. Out: for each turn the job that was drawn; and for one loader, for as many as the profile asks for at the
start, and for loaders that are scaled, the summed wait, the work of all loaders, what of it was done twice, and the
decisions. The costly source goes through a map; its share rises from between 0.1 and 15 % to 40 % and falls back, and a
page costs what was drawn when a loader meets it first. A loader listens two seconds after its decision. See
`virtual_runs` for what of that is the real thing. Must hold: loaders that are scaled are waited for no longer than one
loader is, but for the time in which a loader starts, and none that ends owes anything. A turn that is done is not run
again. Cost: five seconds a turn.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from tests.support.scaled_jobs import write_scaled_job
from tests.support.trial import continued, trial_parser
from tests.support.virtual_runs import virtual_run

CONTESTANTS = {"one": 1, "auto": "auto", "scaled": "autoscale"}


def try_wait(seed: int, number: int, *, steps: int | None = None, rows: int | None = None) -> dict[str, Any]:
    """One turn."""
    chance = random.Random(f"{seed}/{number}")
    begins = chance.choice([30, 60, 140, 200])
    ends = begins + chance.choice([1, 20, 50, 100])
    falls = ends + chance.choice([20, 50, 150])
    job = {
        "share": chance.choice(["0.1%", "1%", "4%", "15%"]),
        "rise": (begins, ends, falls),
        "samples": chance.choice([32, 128, 256, 1024]),
        "most": chance.choice([2, 4, 7, 16]),
    }
    run = {
        "steps": steps or falls + chance.choice([0, 100]),
        "compute_s": 0.0005 * job["samples"] * chance.choice([0.5, 1, 2]),
        "page_s": chance.choice([0.0, 0.0, 0.005, 0.02]),
    }
    found: dict[str, Any] = {**job, **run}
    with tempfile.TemporaryDirectory(prefix="torchmix-wait-") as name:
        folder = Path(name)
        rows = rows or chance.choice([2_000, 8_000])
        module = f"wait_map_{seed}_{number}"
        recipe = write_scaled_job(folder, least=1, sleep_s=0.0, module=module, web_ns=300, rows=rows, **job)
        for what, loaders in CONTESTANTS.items():
            one = virtual_run(recipe, folder / what, loaders=loaders, **run)
            found[what] = one._asdict()
    assert found["scaled"]["lost_s"] == 0.0, found
    assert found["scaled"]["wait_s"] <= found["one"]["wait_s"] + 0.05, found
    return found


def main() -> None:
    """Run the turns that the file does not have yet."""
    found = continued(trial_parser(__doc__, count=40).parse_args(), try_wait)
    for what in CONTESTANTS:
        print(f"{what}: {sum(turn[what]['wait_s'] for turn in found.values()):.1f} s")


if __name__ == "__main__":
    main()
