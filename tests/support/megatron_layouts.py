"""Megatron's schedules on torchmix's iterators at many layouts, compared with an oracle and with one rank alone.

In: a folder with files, recipes and plans, and layouts. Out: nothing, or an AssertionError that names the layout. What
each `get_batch` returned is compared with an oracle that knows nothing of torchmix, and the loss of every sample with
that of one rank alone. A hang ends at a deadline that prints the stacks of all ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support import oracle
from tests.support.forks import MEGATRON
from tests.support.layouts import LENGTH, SAMPLES, Layout, digest_of, layouts_of, write_bytes_job
from tests.support.processes import Processes
from torchmix.cli.main import main

LAYOUT_S = 60.0
"""A layout takes about 3 s where 8 ranks have 2 cores to themselves."""
ALIGN_TOKENS, STEPS = 16, 2
PLANNED_STEPS = 6
SCRIPTS = {"document": "0.20", "none": "0.16"}
"""Whose `get_batch` the ranks call, by the boundaries of the recipe: dense batches go the older way."""
LAYERS = (2, 4, 8)
"""The models that one rank runs alone; a pipeline needs a layer for each chunk."""
BACKWARD_RANKS = 4
"""More ranks on two cores are slow: one step, without its backward."""

Documents = dict[str, list[list[int]]]


def write_corpus(folder: Path) -> Documents:
    """Files, a recipe and plans of 1 to 8 replicas for both kinds of boundaries; documents as the oracle reads them."""
    for boundaries in SCRIPTS:
        recipe = write_bytes_job(folder, boundaries=boundaries, align_tokens=ALIGN_TOKENS)
        assert main(["index", str(recipe)]) == 0
        for dp in (1, 2, 4, 8):
            out = folder / f"plan-{boundaries}-{dp}"
            assert main(["plan", str(recipe), "--steps", str(PLANNED_STEPS), "--dp", str(dp), "--out", str(out)]) == 0
    return {name: oracle.read_text_documents([folder / f"{name}.parquet"], "text") for name in ("long", "short")}


def training_layouts(world_size: int, boundaries: str) -> list[Layout]:
    """Every layout of so many ranks, as `check_training` runs it."""
    is_large = world_size > BACKWARD_RANKS
    return layouts_of(
        world_size, script=SCRIPTS[boundaries], steps=1 if is_large else STEPS, forward_only=int(is_large)
    )


def run_world(folder: Path, out: Path, boundaries: str, layouts: list[Layout]) -> list[list[dict[str, Any]]]:
    """What the ranks of each layout have seen: by layout, then by rank."""
    deadline_s = 60 + LAYOUT_S * len(layouts)
    arguments = [str(folder / f"{boundaries}.yaml"), str(out), str(deadline_s), *(layout.name for layout in layouts)]
    with Processes(folder) as processes:
        child = processes.fork_python("-m", "tests.support.megatron_world", *arguments, after=MEGATRON)
        assert child.wait(deadline_s=60 + deadline_s) == 0, child.report()
    seen = []
    for size, group in groupby(layouts, lambda layout: layout.world_size):
        lines = [(out / str(size) / f"rank-{rank}.jsonl").read_text().splitlines() for rank in range(size)]
        seen += [[json.loads(line) for line in of_layout] for of_layout in zip(*lines, strict=True)]
        assert len(seen[-1]) == size and len(lines[0]) == len(list(group))
    return seen


def expected_digests(
    plan: Path, documents: dict[str, list[list[int]]], boundaries: str, layout: Layout, *, steps: range, part: str
) -> Iterator[dict[str, str]]:
    """What the oracle expects each rank's chunks to have been handed in some steps of a plan, by rank."""
    job = oracle.Job(
        length=LENGTH,
        boundaries=boundaries,
        method="best_fit",
        align_tokens=ALIGN_TOKENS,
        micro_batch_size=1,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        dp=layout.dp,
    )
    for rank, microbatches in enumerate(oracle.expected_microbatches(plan / "pieces.parquet", documents, job)):
        stage = rank // (layout.tp * layout.cp * layout.dp)
        digests = {}
        for chunk in range(layout.vp or 1):
            is_first = stage == 0 and chunk == 0
            is_last = stage == layout.pp - 1 and chunk == (layout.vp or 1) - 1
            for microbatch in (each for each in microbatches if each["step"] in steps):
                names = ["tokens", "position_ids"] * is_first + ["labels", "loss_mask"] * is_last
                names += ["cu_seqlens_padded", "max_seqlen"] * (boundaries == "document")
                key = f"{part}/{chunk}/{microbatch['step']}/{microbatch['index']}"
                digests[key] = digest_of({name: microbatch[name] for name in names})
        yield digests


def losses_of_samples(
    folder: Path, boundaries: str, layout: Layout, ranks: list[dict[str, Any]]
) -> dict[tuple[int, int], float]:
    """(step, sample) -> sum of the losses of its tokens, over the context-parallel ranks."""
    pieces = pq.read_table(folder / f"plan-{boundaries}-{layout.dp}" / "pieces.parquet").to_pylist()
    sample_at = {(piece["step"], piece["dp_rank"], piece["microbatch"]): piece["sample"] for piece in pieces}
    losses: dict[tuple[int, int], float] = {}
    for rank, seen in enumerate(ranks):
        if rank % layout.tp:
            continue  # tensor-parallel ranks compute the same
        replica = rank // (layout.tp * layout.cp) % layout.dp
        for key, ((total, _tokens),) in seen["losses"].items():
            step, index = map(int, key.split("/"))
            place = step, sample_at[step, replica, index]
            losses[place] = losses.get(place, 0.0) + total
    return losses


def losses_of_sources(ranks: list[dict[str, Any]]) -> list[dict[str, tuple[float, int]]]:
    """What the last rank has logged for each step: source -> mean loss, tokens."""
    logs = [rank["log"] for rank in ranks if rank["log"]]
    assert logs == [ranks[-1]["log"]], "only the last rank logs"
    entry = re.compile(r"\| (\w+) ([\d.E+-]+) \(([\d,]+) tokens\)")
    return [
        {name: (float(mean), int(tokens.replace(",", ""))) for name, mean, tokens in entry.findall(line)}
        for line in logs[0]
    ]


def check_training(folder: Path, documents: Documents, boundaries: str, layouts: list[Layout], out: Path) -> None:
    """Each layout is handed what the plan says, and computes the loss of every sample that one rank alone does.

    Args:
        folder: The folder of `write_corpus`.
        documents: Its result.
        boundaries: The boundaries of the recipe.
        layouts: Those of `training_layouts`, in an order in which those of like size are neighbours.
        out: An empty folder, or none.
    """
    one: dict[int, dict[tuple[int, int], float]] = {}
    sources_of_one: dict[int, list[dict[str, tuple[float, int]]]] = {}
    layouts = [Layout(script=SCRIPTS[boundaries], steps=STEPS, layers=layers) for layers in LAYERS] + layouts
    for layout, ranks in zip(layouts, run_world(folder, out, boundaries, layouts), strict=True):
        steps, plan = range(layout.steps), folder / f"plan-{boundaries}-{layout.dp}"
        digests = expected_digests(plan, documents, boundaries, layout, steps=steps, part="train")
        for rank, expected in enumerate(digests):
            assert ranks[rank]["digests"] == expected, f"{layout.name}: rank {rank}"
        losses = losses_of_samples(folder, boundaries, layout, ranks)
        losses_of_one = one.setdefault(layout.num_layers, losses)
        assert sorted(losses) == [place for place in sorted(losses_of_one) if place[0] in steps], layout.name
        worst = max(abs(losses[place] / losses_of_one[place] - 1) for place in losses)
        assert worst < 1e-5, f"{layout.name}: a loss differs by {worst:.1e}"
        sources = losses_of_sources(ranks)
        assert len(sources) == layout.steps
        for step, alone in zip(sources, sources_of_one.setdefault(layout.num_layers, sources), strict=False):
            assert step == {name: (pytest.approx(alone[name][0], rel=1e-5), alone[name][1]) for name in alone}
    assert sorted(one) == list(LAYERS)
    for layers, alone in one.items():
        assert len(alone) == STEPS * SAMPLES
        assert len({round(loss, 3) for loss in alone.values()}) > SAMPLES, "losses all alike would prove nothing"
        assert np.isfinite(list(alone.values())).all()
        assert [sorted(step) for step in sources_of_one[layers]] == [["long", "short"]] * STEPS
