"""Where steps are read changes no tensor: every layout and mode against an oracle that does not know torchmix.

    python -m tests.trials.oracle_modes --seed 1 --count 24 [--out oracle_modes-1.json]

Each run has sources of all formats (token lists, text, ids that the index kept, JSON lines, Arrow, .bin), whose files
lie on disk as its seed says, and a layout, which the runs take in turn. It goes on from state to state over the modes
in an order of its own: `in_process`, threads of the leaders; `node`, one worker; `hosts`, two hosts as namespaces of
networks and processes that a link joins, with a worker each. The tensors of every rank are compared with what the
oracle makes of the plan and of whole files, and the order digests with the plan's. Run i follows from the seed and i
alone. Where namespaces may not be made, `hosts` is left out and the result says so.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support import oracle
from tests.support.hosts import hosts, start_on
from tests.support.loaders import Rank, run_job
from tests.support.oracle_job import ALIGN_TOKENS, LENGTH, assert_equal, expected_of_ranks, write_data, write_recipe
from tests.support.processes import Processes, wait_until
from tests.support.tensor_rank import written
from torchmix.parallel.topology import Topology

LAYOUTS = ({"dp": 8}, {"tp": 2, "dp": 2}, {"cp": 2, "dp": 2}, {"pp": 2, "dp": 2})
MODES = ("in_process", "node", "hosts")
STEPS = 2
"""In each mode."""
DEADLINE_S = 240.0


def _on_hosts(
    recipe: Path, folder: Path, topology: Topology, state: dict[str, Any] | None, micro: int
) -> list[Rank] | None:
    """What ranks on two hosts are handed; None where there can be no hosts."""
    folder.mkdir()
    if state is not None:
        (folder / "state").write_bytes(state["torchmix_state"])
    words = (str(recipe), str(folder), *map(str, (STEPS, topology.tp, topology.cp, topology.pp)))
    with ExitStack() as stack:
        try:
            places = stack.enter_context(hosts(2))
        except pytest.skip.Exception:
            return None
        processes = stack.enter_context(Processes(folder))
        more = {"LOADERS": "node", "MICRO": str(micro)}
        ranks = start_on(processes, places, topology.world_size, "tests.support.tensor_rank", *words, **more)
        wait_until(
            lambda: any(rank.returncode for rank in ranks) or all(rank.returncode == 0 for rank in ranks),
            deadline_s=DEADLINE_S,
            what=processes.report,
        )
        assert not any(rank.returncode for rank in ranks), processes.report()
        wait_until(lambda: not any(rank.session for rank in ranks), deadline_s=DEADLINE_S, what=processes.report)
    return [written(folder, rank) for rank in range(topology.world_size)]


def one_run(seed: int, number: int, modes: Sequence[str] = MODES) -> dict[str, Any]:
    """A job that goes on from mode to mode."""
    draw = random.Random(f"{seed}/{number}")
    sizes = LAYOUTS[number % len(LAYOUTS)]
    method, boundaries = draw.choice(("concat", "best_fit")), draw.choice(("document", "none"))
    micro = 1 if sizes["dp"] == 8 else draw.choice((1, 2))
    order = draw.sample(modes, len(modes))
    done: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data_seed = draw.randrange(2**31)
        documents = write_data(folder, data_seed)
        recipe = write_recipe(folder, data_seed, method, boundaries)
        job = oracle.Job(
            length=LENGTH,
            boundaries=boundaries,
            method=method,
            align_tokens=ALIGN_TOKENS,
            micro_batch_size=micro,
            **sizes,
        )
        plan = folder / "plan"
        expected = expected_of_ranks(recipe, documents, job, steps=STEPS * len(order), folder=plan)
        rows = pq.read_table(plan / "steps.parquet").to_pylist()
        digests = {row["step"]: row["order_digest"] for row in rows}
        topology, state, step = Topology(**sizes), None, 0
        for mode in order:
            if mode == "hosts":
                found = _on_hosts(recipe, folder / "hosts", topology, state, micro)
                if found is None:
                    continue
            else:
                found = run_job(recipe, topology, steps=STEPS, state=state, loaders=mode, micro_batch_size=micro)
            for rank, wanted in zip(found, expected, strict=True):
                due = [one for one in wanted if step <= one["step"] < step + STEPS]
                for given, one in zip(rank.microbatches, due, strict=True):
                    assert_equal(given, one, f"{mode} of {order}, step {one['step']}")
                assert rank.digests == [digests[at] for at in range(step, step + STEPS)], f"{mode} of {order}"
            state, step = found[0].state, step + STEPS
            done.append(mode)
    return {"layout": sizes, "modes": done}


def run_trial(*, seed: int, count: int, out: Path | None = None, modes: Sequence[str] = MODES) -> dict[str, Any]:
    """Go on until `count` runs are done."""
    result: dict[str, Any] = {"seed": seed, "runs": 0, "legs": {}, "wrong": []}
    if out is not None and out.exists():
        result = json.loads(out.read_text())
    while result["runs"] < count:
        number = result["runs"]
        try:
            found = one_run(seed, number, modes)
            for mode in found["modes"]:
                key = f"{found['layout']}, {mode}"
                result["legs"][key] = result["legs"].get(key, 0) + 1
        except Exception:
            result["wrong"].append({"run": number, "error": traceback.format_exc()})
        result["runs"] = number + 1
        if out is not None:
            out.write_text(json.dumps(result, indent=1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=24, help="runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(json.dumps(run_trial(seed=arguments.seed, count=arguments.count, out=arguments.out), indent=1))


if __name__ == "__main__":
    main()
