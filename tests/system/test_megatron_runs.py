"""Megatron's own schedules on bins of several context-parallel sizes, on eight CPU ranks.

What `get_batch` returns to each rank is what the oracle makes of the plan; losses are those of every other layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support import oracle
from tests.support.layouts import LENGTH, Layout, digest_of, write_bytes_job
from tests.support.megatron_layouts import run_world
from tests.trials.context_delivery import expected_of_plan
from torchmix.cli.main import main

pytestmark = pytest.mark.system

RANK_TOKENS, PER_TOKEN, PER_PAIR, PER_EXCHANGED = 48, 100, 1, 60
STEPS = 2
CONTEXT = f"context: {{rank_tokens: {RANK_TOKENS}, per_exchanged: {PER_EXCHANGED}}}"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[oracle.Document]]]:
    """The folder of the recipe, and its documents."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = write_bytes_job(folder, boundaries="document", extra="split: [90, 10, 0]")
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith(("packing:", "balance:"))]
    cost = f"cost: {{per_token: {PER_TOKEN}, per_pair: {PER_PAIR}}}"
    lines += ["packing: {method: whole}", f"balance: {{{CONTEXT}, {cost}}}", ""]
    recipe.write_text("\n".join(lines))
    assert main(["index", str(recipe)]) == 0
    documents = {
        name: [
            oracle.Document(ids, [True] * len(ids), {})
            for ids in oracle.read_text_documents([folder / f"{name}.parquet"], "text")
        ]
        for name in ("long", "short")
    }
    return folder, documents


def digests_of_plan(
    folder: Path, documents: dict[str, list[oracle.Document]], layout: Layout, steps: range, out: Path
) -> list[dict[str, str]]:
    """By rank, what `get_batch` is to return."""
    sizes = {name: getattr(layout, name) for name in ("dp", "cp", "pp", "tp")}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    assert main(["plan", str(folder / "document.yaml"), "--steps", str(steps.stop), *words, "--out", str(out)]) == 0
    rows = pq.read_table(out / "pieces.parquet").to_pylist()
    numbers = {"per_token": PER_TOKEN, "per_pair": PER_PAIR, "per_exchanged": PER_EXCHANGED, "per_microbatch": 0}
    expected = expected_of_plan(
        [[row for row in rows if row["step"] == step] for step in steps],
        documents,
        sizes,
        length=LENGTH,
        align=1,
        rank_tokens=RANK_TOKENS,
        microbatches_of=layout.pp if layout.vp else 1,
        **numbers,
    )
    return [
        {
            f"train/{chunk}/{one['step']}/{one['index']}": digest_of(fields_of_chunk(one, chunk, layout))
            for one in of_rank
            for chunk in range(layout.vp or 1)
        }
        for of_rank in expected
    ]


def fields_of_chunk(one: dict[str, Any], chunk: int, layout: Layout) -> dict[str, Any]:
    """What a chunk of a rank takes of a microbatch: the first one tokens, the last one labels."""
    names = ["cu_seqlens_padded"]
    names += ["tokens", "position_ids"] if chunk == 0 else []
    names += ["labels", "loss_mask"] if chunk == (layout.vp or 1) - 1 else []
    numbers = {"max_seqlen": np.array(one["max_seqlen"]), "local_cp_size": np.array(len(one["cp_ranks"]))}
    return {**{name: one[name] for name in names}, **numbers}


def loss_of_steps(ranks: list[dict[str, Any]], layout: Layout) -> dict[int, float]:
    """The sum of losses over all ranks but copies, by step."""
    found: dict[int, float] = {}
    for rank, record in enumerate(ranks):
        if rank % layout.tp == 0:
            for key, sums in record["losses"].items():
                step = int(key.split("/")[0])
                found[step] = found.get(step, 0.0) + sum(loss for loss, _ in sums)
    return found


def test_schedules_get_planned_bins_and_compute_the_same_losses(
    job: tuple[Path, dict[str, list[oracle.Document]]], tmp_path: Path
) -> None:
    folder, documents = job
    layouts = [
        Layout(tp=2, cp=2, dp=2, steps=STEPS, runs=1, script="0.16", rerun=1),
        Layout(cp=2, dp=4, steps=1, runs=1, resume=1),
        Layout(cp=2, pp=2, dp=2, steps=STEPS, runs=2, script="dev", rerun=1),
        Layout(tp=2, dp=4, steps=STEPS, runs=1, script="0.20", passes=1),
    ]
    seen = run_world(folder, tmp_path / "out", "document", layouts)
    losses = []
    for number, layout in enumerate(layouts):
        steps = range(STEPS, STEPS + 1) if layout.resume else range(layout.steps)
        expected = digests_of_plan(folder, documents, layout, steps, tmp_path / f"plan-{number}")
        sizes = set()
        for record, digests in zip(seen[number], expected, strict=True):
            found = record["digests"]
            again = {key.removeprefix("run 1/"): found[key] for key in found if key.startswith("run 1/train")}
            assert {key: found[key] for key in found if key.startswith("train/")} == digests, layout.name
            assert again.items() <= digests.items() and bool(again) == bool(layout.rerun)
            evaluated = [key for key in found if key.startswith("validation/")]
            assert bool(evaluated) == bool(layout.passes)
            sizes.add(len(digests))
        assert len(sizes) == 1 and sizes.pop() > len(steps), "several microbatches a step, as many on each rank"
        losses.append(loss_of_steps(seen[number], layout))
    assert "tokens " in seen[2][0]["log"][0]
    for step in range(STEPS):  # of the last layout those of validation stand in their place
        assert losses[2][step] == pytest.approx(losses[0][step], rel=1e-4)
