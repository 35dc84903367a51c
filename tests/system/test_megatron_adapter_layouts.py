"""Megatron's own schedules on torchmix's iterators, at every layout of 1, 2, 4 and 8 CPU ranks.

What each `get_batch` returned is compared with an oracle that knows nothing of torchmix, and the loss of every sample
with that of one rank alone. A hang ends at a deadline that prints the stacks of all ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.support import oracle
from tests.support.forks import MEGATRON
from tests.support.layouts import LENGTH, SAMPLES, Layout, digest_of, layouts_of, write_bytes_job
from tests.support.processes import Processes
from torchmix.cli.main import main

pytestmark = pytest.mark.system

LAYOUT_S = 60.0
"""A layout takes about 3 s where 8 ranks have 2 cores to themselves."""
ALIGN_TOKENS, STEPS = 16, 2
PLANNED_STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[int]]]]:
    """A folder with files, recipes and plans for 1 to 8 replicas; and the documents, as the oracle reads them."""
    folder = tmp_path_factory.mktemp("layouts")
    for boundaries in ("document", "none"):
        recipe = write_bytes_job(folder, boundaries=boundaries, align_tokens=ALIGN_TOKENS)
        assert main(["index", str(recipe)]) == 0
        for dp in (1, 2, 4, 8):
            out = folder / f"plan-{boundaries}-{dp}"
            assert main(["plan", str(recipe), "--steps", str(PLANNED_STEPS), "--dp", str(dp), "--out", str(out)]) == 0
    documents = {name: oracle.read_text_documents([folder / f"{name}.parquet"], "text") for name in ("long", "short")}
    return folder, documents


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


@pytest.mark.parametrize("boundaries", ["document", "none"])
def test_every_layout_gets_the_plan_and_computes_the_same_loss_of_every_sample(
    corpus: tuple[Path, dict[str, list[list[int]]]], boundaries: str, tmp_path: Path
) -> None:
    folder, documents = corpus
    # What one rank alone computes, by the layers of its model: a pipeline needs a layer for each chunk.
    one: dict[int, dict[tuple[int, int], float]] = {}
    sources_of_one: dict[int, list[dict[str, tuple[float, int]]]] = {}
    # 8 ranks on two cores are slow: one step, without the backward that 4 ranks run. Dense batches go the same way.
    sizes, most = ((2, 4, 8), 4) if boundaries == "document" else ((4,), 1)
    script = "0.20" if boundaries == "document" else "0.16"
    layouts = [Layout(script=script, steps=STEPS, layers=layers) for layers in (2, 4, 8)]
    layouts += [
        each
        for size in sizes
        for each in layouts_of(size, script=script, steps=STEPS if size <= most else 1, forward_only=int(size > most))
    ]
    for layout, ranks in zip(layouts, run_world(folder, tmp_path / "out", boundaries, layouts), strict=True):
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
    assert sorted(one) == [2, 4, 8]
    for layers, alone in one.items():
        assert len(alone) == STEPS * SAMPLES
        assert len({round(loss, 3) for loss in alone.values()}) > SAMPLES, "losses all alike would prove nothing"
        assert np.isfinite(list(alone.values())).all()
        assert [sorted(step) for step in sources_of_one[layers]] == [["long", "short"]] * STEPS


def test_a_state_goes_on_at_another_layout_and_a_step_may_be_run_again(
    corpus: tuple[Path, dict[str, list[list[int]]]], tmp_path: Path
) -> None:
    folder, documents = corpus
    layouts = [
        Layout(dp=4, steps=2),
        Layout(tp=2, pp=2, vp=2, steps=1, resume=1),
        Layout(cp=2, dp=2, steps=1, resume=1, script="0.16"),
        Layout(pp=4, steps=2, resume=1, rerun=1),
    ]
    seen = run_world(folder, tmp_path / "out", "document", layouts)
    first_step = 0
    for number, layout in enumerate(layouts):
        steps, plan = range(first_step, first_step + layout.steps), folder / f"plan-document-{layout.dp}"
        expected = expected_digests(plan, documents, "document", layout, steps=steps, part="train")
        for rank, digests in enumerate(expected):
            found = seen[number][rank]["digests"]
            first_runs = {key.removeprefix("run 1/"): found[key] for key in found if key.startswith("run ")}
            assert {key: digest for key, digest in found.items() if not key.startswith("run ")} == digests, layout.name
            assert len(first_runs) == (SAMPLES if layout.rerun else 0)
            assert first_runs.items() <= digests.items(), "the step that was run again had other tensors before"
        first_step += layout.steps


def test_each_evaluation_of_all_of_validation_is_one_pass(
    corpus: tuple[Path, dict[str, list[list[int]]]], tmp_path: Path
) -> None:
    _, documents = corpus
    folder = tmp_path / "split"
    recipe = write_bytes_job(folder, boundaries="document", align_tokens=ALIGN_TOKENS, extra="split: [95, 5, 0]")
    assert main(["index", str(recipe)]) == 0
    layouts = [Layout(pp=2, dp=2, steps=1, passes=3), Layout(tp=2, pp=2, vp=2, steps=1, passes=2)]
    seen = run_world(folder, tmp_path / "out", "document", layouts)
    for number, layout in enumerate(layouts):
        out = tmp_path / f"plan-{layout.dp}"
        plan = ["plan", str(recipe), "--part", "validation", "--one-pass", "--dp", str(layout.dp), "--out", str(out)]
        assert main(plan) == 0
        pieces = pq.read_table(out / "pieces.parquet")
        last = max(pieces["step"].to_pylist())
        # The last step is not full, which the oracle does not know.
        pq.write_table(pieces.filter(pc.less(pieces["step"], last)), out / "pieces.parquet")
        expected = expected_digests(out, documents, "document", layout, steps=range(last), part="validation")
        for rank, digests in enumerate(expected):
            found = seen[number][rank]["digests"]
            passes: dict[str, dict[str, str]] = {}
            for key, digest in found.items():
                run, is_validation, rest = key.rpartition("validation/")
                if is_validation:
                    passes.setdefault(run, {})[f"validation/{rest}"] = digest
            assert len(passes) == layout.passes
            for again in passes.values():
                assert again == passes[""], "another pass"
            whole = (layout.vp or 1) * SAMPLES // layout.dp
            assert len(passes[""]) == (last + 1) * whole
            assert digests.items() <= passes[""].items()
            assert len(digests) == last * whole
