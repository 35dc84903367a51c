"""Bins of several context-parallel sizes: what the model is given is the plan, also after a kill, elsewhere, skipped.

In: a `Bench`. Out: a list of what is wrong, or None where the version lacks such context parallelism. Must hold: the
slices of the ranks that share a bin, put together, are the documents that a single rank has without Megatron, each once
in its step. Cost: three short runs of four ranks.

    core 0.16 to main   --hybrid-context-parallel
    dev                 --dynamic-context-parallel; it asks Transformer Engine for its version, which is stood in for
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from cells import SAVE_AT, STEPS, Layout
from consumed import Line, Samples, difference, hash_of, in_order, read_records
from corpus import RANK_TOKENS
from features import missing
from launch import Run, wait
from matrix import Bench

WIDE = Layout(name="DP2 x CP2", dp=2, cp=2)
OTHER = Layout(name="TP2 x DP2", dp=2, tp=2)
"""Two ranks of dp x cp."""


def runs_of_ranks(bench: Bench) -> list[str] | None:
    """Four ranks are killed after a checkpoint; others, of another dp and cp, continue; and one skips a step."""
    flags = flags_of_version(bench.runner.checkout)
    if flags is None:
        return None
    plan = planned_documents(bench.recipe("-runs-alone"), STEPS)
    flags += ["--max-seqlen-per-dp-cp-rank", str(RANK_TOKENS), "--dataloader-type", "single"]
    evaluation = ["--eval-interval", "2", "--eval-iters", "1"]
    saved = bench.checkpoints("runs")
    killed = killed_after_checkpoint(bench, saved, [*bench.first_weights, *flags, *evaluation])
    if SAVE_AT + 1 not in killed.loss_of_iteration:
        return ["the run ended before it was killed", killed.trouble]
    problems = problems_of_bins(killed, WIDE, {step: plan[step] for step in range(SAVE_AT)}, may_go_on=True)
    problems += missing(killed, "validation loss at iteration 2")
    resumed = bench.train("runs resumed", OTHER, [*flags, "--load", str(saved)], variant="-runs")
    if not resumed.is_fine:
        return [*problems, resumed.trouble]
    problems += problems_of_bins(resumed, OTHER, {step: plan[step] for step in range(SAVE_AT, STEPS)})
    training = (bench.runner.checkout / "megatron" / "training" / "training.py").read_text(encoding="utf-8")
    counts_from = 1 if "(iteration + 1) in args.iterations_to_skip" in training else 0
    skip = [*bench.first_weights, *flags, "--iterations-to-skip", "2"]
    skipped = bench.train("runs skipped", WIDE, skip, variant="-runs")
    if not skipped.is_fine:
        return [*problems, skipped.trouble]
    wanted = {step: plan[step] for step in range(STEPS) if step != 2 - counts_from}
    return [*problems, *problems_of_bins(skipped, WIDE, wanted)]


def flags_of_version(checkout: Path) -> list[str] | None:
    """The flags that this version has for it; its own dataset for documents of any length goes with a recipe."""
    training = (checkout / "megatron" / "training" / "training.py").read_text(encoding="utf-8")
    if "wrap_data_iterator" in training:
        varlen = ["--use-varlen-dataset"] if "use_varlen_dataset" in training else []
        return ["--dynamic-context-parallel", *varlen]
    return ["--hybrid-context-parallel"] if "HybridCPDataLoaderWrapper" in training else None


def killed_after_checkpoint(bench: Bench, saved: Path, more: Sequence[str]) -> Run:
    """A run whose ranks are killed once the step behind the first checkpoint is in the log."""
    name = f"{bench.packing} runs"
    save = ["--save", str(saved), "--save-interval", str(SAVE_AT)]
    arguments = bench.arguments(WIDE, [*more, *save], variant="-runs")
    with bench.runner.started(name, arguments, ranks=WIDE.ranks) as processes:
        print(f"{name} ...", flush=True)
        end_s = time.monotonic() + bench.runner.deadline_s
        while SAVE_AT + 1 not in bench.runner.result(name, [None] * WIDE.ranks).loss_of_iteration:
            if time.monotonic() > end_s or any(process.poll() is not None for process in processes):
                break
            time.sleep(0.1)
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        wait(processes, 10.0)
        return bench.runner.result(name, [process.poll() for process in processes])


def planned_documents(recipe: Path, steps: int) -> dict[int, Samples]:
    """Hashes of what one rank without Megatron has of each step's documents, tokens, labels and masks."""
    import torchmix

    found: dict[int, Samples] = defaultdict(list)
    with torchmix.build_loader(recipe, loaders="in_process", max_steps=steps) as loader:
        for one in loader:
            fields = [field.flatten().int().tolist() for field in (one.tokens, one.labels, one.loss_mask)]
            found[one.step] += documents_of(fields, one.cu_seqlens_padded.tolist())
    return {step: sorted(documents) for step, documents in found.items()}


def documents_of(fields: Sequence[Sequence[int]], boundaries: Sequence[int]) -> Samples:
    """A hash of each document of a bin without its padding, which has no id of the corpus; no hash of one without."""
    found = []
    for start, stop in itertools.pairwise(boundaries):
        while stop > start and not fields[0][stop - 1]:
            stop -= 1
        if stop > start:
            found.append(hash_of([value for field in fields for value in field[start:stop]]))
    return found


def problems_of_bins(run: Run, layout: Layout, wanted: dict[int, Samples], *, may_go_on: bool = False) -> list[str]:
    """What a run consumed otherwise than planned.

    Args:
        run: That has ended, or was ended.
        layout: Of its ranks.
        wanted: Step -> hashes of its documents.
        may_go_on: Whether it may have consumed steps behind these.
    """
    taken: dict[int, dict[tuple[int, int], list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in read_records(run.records):
        if line["step"] is not None and (line["step"] in wanted or not may_go_on):
            taken[line["step"]][line["dp"] * layout.cp + line["cp"], line["tp"]].append(line)
    problems, found = [], {}
    for step, lines_of in taken.items():
        counts = {len(lines) for lines in lines_of.values()}
        if len(counts) != 1:
            problems.append(f"step {step}: ranks have {sorted(counts)} microbatches")
            continue
        for (place, tp), lines in lines_of.items():
            kept = [{**line, "tp": 0} for line in lines]
            if kept != lines_of[place, 0]:
                problems.append(f"step {step}: tensor-parallel rank {tp} took other bins than rank 0")
        found[step] = sorted(document for index in range(*counts) for document in bins_of(lines_of, index, layout))
    sizes = {line["cp_size"] for of_step in taken.values() for lines in of_step.values() for line in lines}
    if len(sizes) < 2:
        problems.append(f"all bins have {sizes} ranks, so nothing was checked")
    others = [f"step {step}: consumed, but not wanted" for step in found if step not in wanted]
    return [*problems, *others, *difference(wanted, found)]


def bins_of(lines_of: dict[tuple[int, int], list[Line]], index: int, layout: Layout) -> Samples:
    """The documents of all bins of a microbatch."""
    found: Samples = []
    place = 0
    while place < layout.dp * layout.cp:
        size = lines_of[place, 0][index]["cp_size"]
        lines = [lines_of[other, 0][index] for other in range(place, place + size)]
        boundaries = lines[0]["boundaries"]
        assert all((line["cp_size"], line["boundaries"]) == (size, boundaries) for line in lines), "ranks share a bin"
        fields = [in_order([line[name] for line in lines], boundaries) for name in ("tokens", "labels", "mask")]
        found += documents_of(fields, boundaries)
        place += size
    return found


RUN_FEATURES: dict[str, Callable[[Bench], list[str] | None]] = {"runs of ranks": runs_of_ranks}
"""By the name of their line."""
