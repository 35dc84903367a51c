"""Runs of a packing at every layout, and what each must have consumed.

In: a `Runner`, the corpus, and a checkpoint of first weights. Out: a `Cell` for each layout. Must hold: each run is
compared with torchmix's plan, which knows no ranks, and with the losses of a single rank. Cost: two runs a layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cells import SAVE_AT, SINGLE, STEPS, Layout, training_arguments
from consumed import Line, Samples, consumed, difference, planned_samples, read_records
from corpus import LENGTH
from launch import Run, Runner
from table import Cell

TOLERANCE = 1e-5
"""Relative; Megatron prints 7 digits."""
RESUMED_ITERATIONS = (SAVE_AT + 1, *range(SAVE_AT + 3, STEPS + 1))
"""Megatron's second line after a resume shows the mean of two iterations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where runs of one packing are made."""

    runner: Runner
    packing: str
    weights: Path
    """Checkpoint from which all runs begin, without its optimizer and its step."""

    @property
    def first_weights(self) -> list[str]:
        """Flags of a run that begins."""
        return ["--pretrained-checkpoint", str(self.weights)]

    def recipe(self, variant: str = "") -> Path:
        """One of the recipes that `corpus.py` writes."""
        return self.runner.folder / "corpus" / f"{self.packing}{variant}.yaml"

    def checkpoints(self, name: str) -> Path:
        """A folder for the checkpoints of a run."""
        return self.runner.folder / "checkpoints" / f"{self.packing}-{name}".replace(" ", "-")

    def train(
        self,
        name: str,
        layout: Layout,
        more: Sequence[str],
        *,
        variant: str = "",
        schedule: Sequence[str] | None = None,
        **environment: str,
    ) -> Run:
        """A run to its end; see `training_arguments` and `Runner.run`."""
        arguments = self.arguments(layout, more, variant=variant, schedule=schedule)
        return self.runner.run(f"{self.packing} {name}", arguments, ranks=layout.ranks, **environment)

    def arguments(
        self, layout: Layout, more: Sequence[str], *, variant: str = "", schedule: Sequence[str] | None = None
    ) -> list[str]:
        """Megatron's, of one run."""
        return [*training_arguments(layout, self.recipe(variant), packing=self.packing, schedule=schedule), *more]


def cells_of_packing(bench: Bench, layouts: Sequence[Layout]) -> list[Cell]:
    """The reference of a packing, and a cell for each layout."""
    plan = planned_samples(bench.recipe(), STEPS)
    reference = bench.train("reference", SINGLE, bench.first_weights)
    first = Cell(packing=bench.packing, name=SINGLE.name)
    first.note("plan", problems_of_run(reference, SINGLE, plan))
    return [first, *(cell_of_layout(bench, layout, plan=plan, reference=reference) for layout in layouts)]


def cell_of_layout(bench: Bench, layout: Layout, *, plan: dict[int, Samples], reference: Run) -> Cell:
    """Train at a layout, save, and resume on a single rank."""
    cell = Cell(packing=bench.packing, name=layout.name)
    started_s = time.monotonic()
    saved = bench.checkpoints(layout.name)
    run = bench.train(
        layout.name, layout, [*bench.first_weights, "--save", str(saved), "--save-interval", str(SAVE_AT)]
    )
    cell.note("plan", problems_of_run(run, layout, plan))
    cell.note("loss", unequal_losses(reference, run, range(1, STEPS + 1)))
    if run.is_fine:
        resumed = bench.train(f"{layout.name} resumed", SINGLE, ["--load", str(saved), "--ckpt-step", str(SAVE_AT)])
        cell.note("resume", problems_of_run(resumed, SINGLE, plan, first=SAVE_AT))
        cell.note("resumed loss", unequal_losses(reference, resumed, RESUMED_ITERATIONS))
    cell.wall_s = time.monotonic() - started_s
    print(cell.verdict, flush=True)
    return cell


def problems_of_run(
    run: Run, layout: Layout, plan: dict[int, Samples], *, first: int = 0, skipped: Sequence[int] = ()
) -> list[str]:
    """What a run consumed otherwise than planned.

    Args:
        run: That has ended.
        layout: The layout of its ranks.
        plan: Step -> samples, of all steps until the run's last.
        first: Its first step.
        skipped: Steps that it should have passed over.
    """
    if not run.is_fine:
        return [f"exit codes {run.exit_codes}", run.trouble]
    wanted = {step: samples for step, samples in plan.items() if step >= first and step not in skipped}
    return problems_of_lines([line for line in read_records(run.records) if line["step"] is not None], layout, wanted)


def problems_of_lines(lines: Sequence[Line], layout: Layout, wanted: dict[int, Samples]) -> list[str]:
    """What lines of a record hold otherwise than wanted, and what is in them that should not be."""
    found = consumed(lines, cp=layout.cp, pp=layout.pp, chunks=layout.chunks, length=LENGTH)
    others = [f"step {step}: consumed, but not wanted" for step in found.samples_of_step if step not in wanted]
    return [*found.problems, *others, *difference(wanted, found.samples_of_step)]


def unequal_losses(reference: Run, run: Run, iterations: Sequence[int]) -> list[str]:
    """Iterations whose losses differ by more than `TOLERANCE` of their size, a line each."""
    lines = []
    for iteration in iterations:
        expected, found = (each.loss_of_iteration.get(iteration) for each in (reference, run))
        if expected is None or found is None:
            lines.append(f"iteration {iteration}: no loss in the log")
        elif not math.isclose(expected, found, rel_tol=TOLERANCE):
            lines.append(f"iteration {iteration}: {found} instead of {expected}")
    return lines
