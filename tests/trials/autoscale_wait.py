"""How long a trainer waits for data while a share rises tenfold: with one loader, and with `autoscale`.

    python -m tests.trials.autoscale_wait --seed 1 --count 1 --out wait.json

In: nothing. Out: for each turn the summed wait of both runs, their ratio, and the loaders of each decision. The source
`slow` goes through a map that sleeps 2 ms a row, as one that asks a remote service; its share rises from 4 % to 40 % in
50 steps and falls back after 20 more. The trainer sleeps 100 ms a step, in place of a model. Must hold: both runs get
the same order. A turn that is done is not run again. Cost: a minute a turn.
"""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.deadlines import LONG_S
from tests.support.processes import Processes
from tests.support.scaled_jobs import decisions_of_log, write_scaled_job
from tests.support.trial import continued, trial_parser
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

COMMAND = "from torchmix.cli.main import main; raise SystemExit(main())"


def waits_of(recipe: Path, folder: Path, *, steps: int, samples: int, compute_s: float) -> tuple[float, str]:
    """Seconds that a trainer waits in all steps but the first, and the order digest."""
    loaders = {"where": "remote", "endpoints": str(folder)}
    wait_s = 0.0
    with build_loader(
        recipe, topology=Topology(), micro_batch_size=samples, max_steps=steps, loaders=loaders
    ) as loader:
        batches = iter(loader)
        for step in range(steps):
            began_s = time.monotonic()
            next(batches)
            if step:
                wait_s += time.monotonic() - began_s
            time.sleep(compute_s)
        return wait_s, loader.order_digest


def try_wait(
    seed: int,
    number: int,
    *,
    steps: int = 130,
    samples: int = 256,
    rows: int = 20_000,
    most: int = 7,
    compute_s: float = 0.1,
    sleep_s: float = 0.002,
) -> dict[str, Any]:
    """One turn: a run with one loader, and a run with loaders that are scaled."""
    found: dict[str, Any] = {"steps": steps, "compute_s": compute_s}
    with tempfile.TemporaryDirectory(prefix="torchmix-wait-") as name:
        base = Path(name)
        recipe = write_scaled_job(
            base / "job",
            least=1,
            most=most,
            samples=samples,
            sleep_s=sleep_s,
            module=f"wait_map_{seed}_{number}",
            web_ns=300,
            rows=rows,
        )
        digests = []
        for what, more in (("fixed", ("--processes", "1")), ("scaled", ())):
            folder = base / what
            with Processes(base) as processes:
                words = ("serve", str(recipe), "--register", str(folder), *more)
                server = processes.fork_python("-c", COMMAND, *words, name=what)
                server.wait_for_line("loaders listen at", deadline_s=LONG_S)
                found[f"{what}_wait_s"], digest = waits_of(
                    recipe, folder, steps=steps, samples=samples, compute_s=compute_s
                )
                digests.append(digest)
                server.send_signal(signal.SIGTERM)
                assert server.wait(deadline_s=LONG_S) == 0, server.report()
        assert digests[0] == digests[1], "the order does not depend on loaders"
        taken = decisions_of_log(base / "scaled")
    found["decisions"] = [[one["step"], one["reason"], len(one["loaders"])] for one in taken]
    found["ratio"] = found["scaled_wait_s"] / max(found["fixed_wait_s"], 1e-9)
    return found


def main() -> None:
    """Run the turns that the file does not have yet."""
    continued(trial_parser(__doc__, count=1).parse_args(), try_wait)


if __name__ == "__main__":
    main()
