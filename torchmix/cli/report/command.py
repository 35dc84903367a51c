"""`torchmix report`: a run to look at, from its mixture to the rows of one step, as one page of HTML.

The steps are planned again, as the run had them. Losses, waits and faults are those that the trainer has logged. Cost:
planning of all steps, and reading of the documents of the steps whose texts are shown.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchmix.cli.report.log import RunLog, read_logs
from torchmix.cli.report.page import LiveLook, PageServer, address_of, parts, style
from torchmix.cli.report.steps import PlanFold, RunSteps, decisions_of_records, rows_of_plan, spikes
from torchmix.cli.run import (
    add_decisions,
    add_layout,
    add_state,
    decisions_of,
    layout_of_arguments,
    open_recipe,
    run_fold,
    state_of,
)
from torchmix.cli.show import DocumentReader, html_of_samples
from torchmix.cli.terminal import (
    ExitCode,
    at_least,
    check_folder,
    count_text,
    html_text,
    print_json,
    progress_bar,
    write_html,
)
from torchmix.errors import OptionError
from torchmix.mixture.policies import RecordsOfFunction
from torchmix.mixture.policy_log import StepRecord
from torchmix.parallel.place_tree import Layout
from torchmix.planner.planner import open_planner
from torchmix.recipe.changes import dynamic_of
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import recipe_directory
from torchmix.recipe.sources import maps_of
from torchmix.steps.decisions import EndedLog
from torchmix.steps.history import RunFold, Segment
from torchmix.steps.replay import MANIFEST, PlanManifest, RecordedPlan, read_manifest
from torchmix.steps.state import is_state

HELP = "write one page about a run: its mixture, losses, waits, edits, and the documents of any step"
MOST_SAMPLES = 32
"""Samples of a step whose texts are shown."""
MOST_PIECES = 60_000
"""Pieces without texts that a page has; with more, a step tells the command that shows it."""
NUM_SPIKES = 3
RECIPE = "recipe.yaml"
"""The name that `torchmix init` gives."""
TRIED_STEPS = 100
"""Steps of an edit, in the command that the page says; with a policy, as many as are decided already."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    parser.add_argument(
        "subject",
        type=Path,
        metavar="RUN|STATE|PLAN",
        help="the recipe of a run, or the folder that it is in; the bytes of a state; the folder of a plan",
    )
    parser.add_argument(
        "--recipe",
        type=Path,
        metavar="RECIPE",
        help="of the state or the plan (default: recipe.yaml here, or beside it)",
    )
    add_state(parser, "the steps that its run has had")
    parser.add_argument("--start", type=at_least(0), default=0, metavar="S", help="first step to look at (default 0)")
    parser.add_argument(
        "--steps",
        type=at_least(1),
        metavar="N",
        help="look at the steps before this one (default: the state's or the plan's, or all that the log knows)",
    )
    parser.add_argument(
        "--log",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="what the trainer has logged: a file with a line of JSON a step, or TensorBoard's folder; again",
    )
    parser.add_argument(
        "--texts",
        type=at_least(0),
        action="append",
        default=[],
        metavar="STEP",
        help="show the texts and items of this step, too, beside those of the highest losses; again",
    )
    parser.add_argument("--tokenizer", metavar="T", help="shows ids as text: bytes, tiktoken:NAME or a tokenizer.json")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default report.html)"
    )
    where.add_argument(
        "--serve", metavar="HOST:PORT", help="serve it to this machine instead, as 127.0.0.1:8000: every step has texts"
    )
    add_layout(parser)
    add_decisions(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Plan the steps, and write or serve the page.

    Raises:
        OptionError: A log cannot be read; it is not known how many steps are meant.
        TorchmixError: The recipe is wrong or not indexed, or a step cannot be planned.
    """
    address = None if arguments.serve is None else address_of(arguments.serve)
    if address is None:
        check_folder("--out", arguments.out)
    plan_folder = _look_at(arguments)
    manifest = None if plan_folder is None else read_manifest(plan_folder)
    name, one_pass = ("train", False) if manifest is None else (manifest.part, manifest.one_pass)
    _, directory, part, catalog = open_recipe(arguments.recipe, name, one_pass=one_pass)
    state = state_of(arguments, part, catalog)
    log = read_logs(arguments.log)
    layout = layout_of_arguments(arguments, part)
    fold: RunFold | PlanFold
    decided = None
    if plan_folder is None or manifest is None:
        first = arguments.start
        fold = run_fold(arguments, part, catalog, directory=directory, layout=layout, state=state, first=first)
        decided = decisions_of(arguments, part, directory=directory, state=state)
    else:
        here = recipe_fingerprint(part)
        if manifest.recipe_fingerprint != here:
            raise OptionError(
                f"the plan in {plan_folder} is of recipe {manifest.recipe_fingerprint}, and {arguments.recipe} is "
                f"{here}: name the recipe that it was made from with --recipe"
            )
        layout = _layout_of_plan(arguments, manifest, layout)
        planner = open_planner(part, catalog, layout)
        recorded = RecordedPlan(plan_folder, planner, catalog.fingerprint)
        fold = PlanFold(recorded, planner, Segment(part=part, catalog=catalog))
    told = decided.records if isinstance(decided, EndedLog) else []
    deciding = dynamic_of(part)
    lag = 0 if deciding is None else deciding.lag_steps
    of_run = state.step if state is not None else None if manifest is None else manifest.stop_step
    stop = _stop(arguments, of_run, log.last_step, len(told))
    if manifest is not None and stop > manifest.stop_step:
        raise OptionError(f"--steps {stop}: the plan in {plan_folder} ends before step {manifest.stop_step}")
    records = [record for record, _ in told]
    if isinstance(decided, RecordsOfFunction):
        records = [decided.record(step)[0] for step in range(max(0, stop - lag))]
    _add_losses_of_policy(log, records)
    fold.skip_to(arguments.start)
    steps = RunSteps(fold)
    silent = arguments.json or arguments.quiet
    with progress_bar(stop - steps.first, unit="step", title="planning", silent=silent) as bar:
        steps.plan_until(stop, on_step=bar.update)
    found = spikes(log.losses, most=NUM_SPIKES)
    values = {
        "recipe": str(arguments.recipe),
        "command": _words(arguments, stop),
        "try_steps": lag or TRIED_STEPS,
        "facts": {
            "recipe": recipe_fingerprint(part),
            "catalog": catalog.fingerprint,
            "steps": f"{steps.first} to {steps.stop - 1}",
            "digest": steps.digests[-1],
            "layout": f"dp {layout.dp}, micro-batch size {layout.micro_batch_size}",
        },
        **steps.values(),
        "decisions": [one for one in decisions_of_records(records, lag) if steps.first <= one["step"] < steps.stop],
        "faults": faults_of(log),
        "spikes": [step for step in found if steps.first <= step < steps.stop],
        "losses": _series(log.losses, steps),
        "waits": _series(log.waits, steps),
        "details": {},
    }
    with _details(arguments, steps) as details:
        if address is not None:
            return _serve(arguments, address, values, steps, details)
        wanted = sorted({*values["spikes"], *arguments.texts, steps.stop - 1})
        for step in wanted:
            if not steps.first <= step < steps.stop:
                raise OptionError(f"--texts {step}: the page has the steps {steps.first} to {steps.stop - 1}")
            values["details"][step] = details(step)
        if steps.num_pieces <= MOST_PIECES:
            for step in range(steps.first, steps.stop):
                if step not in values["details"]:
                    values["details"][step] = {"pieces": rows_of_plan(steps.plan(step)[0])}
    write_html(arguments.out, _title(arguments), parts(values), style=style())
    if arguments.json:
        print_json({**{key: value for key, value in values.items() if key != "details"}, "page": str(arguments.out)})
    elif not arguments.quiet:
        print(f"wrote {count_text(steps.stop - steps.first)} steps to {arguments.out}; texts of {_listed(wanted)}")
    return ExitCode.OK


def _look_at(arguments: argparse.Namespace) -> Path | None:
    """Find out what is to be looked at, and set `recipe` and `state`; the folder where that is a plan.

    Raises:
        OptionError: There is nothing, or no recipe for it; an option does not go with it.
    """
    run: Path = arguments.subject
    is_plan = (run / MANIFEST).is_file()
    if not is_plan and (run.is_dir() or not is_state_file(run)):
        if arguments.recipe is not None:
            raise OptionError(f"--recipe goes with a state or the folder of a plan, and {run} is neither")
        arguments.recipe = run / RECIPE if run.is_dir() else run
        return None
    if arguments.state is not None:
        raise OptionError(f"--state {arguments.state}: {run} says already which steps are meant; leave one of them out")
    if arguments.recipe is None:
        beside = (Path(RECIPE), run.parent / RECIPE)
        arguments.recipe = next((path for path in beside if path.is_file()), None)
        if arguments.recipe is None:
            raise OptionError(f"{run}: neither {beside[0]} nor {beside[1]} is its recipe; name it with --recipe")
    if not is_plan:
        arguments.state = run
        return None
    for name in ("accept_edit", "decisions"):
        if getattr(arguments, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')}: the steps of the plan in {run} are known; leave it out")
    return run


def _layout_of_plan(arguments: argparse.Namespace, manifest: PlanManifest, asked: Layout) -> Layout:
    """The layout that a plan's samples were placed on.

    Raises:
        OptionError: Another one is asked for.
    """
    found = replace(asked, dp=manifest.dp, cp=manifest.cp, micro_batch_size=manifest.micro_batch_size)
    for name in ("dp", "cp", "micro_batch_size"):
        if getattr(asked, name) not in (1, getattr(found, name)):
            raise OptionError(
                f"--{name.replace('_', '-')} {getattr(asked, name)}: the plan was placed for {getattr(found, name)}; "
                f"leave it out"
            )
    return found


def is_state_file(path: Path) -> bool:
    """Whether a file begins as the bytes of a state do."""
    try:
        with path.open("rb") as file:
            return is_state(file.read(64))
    except OSError:
        return False


def faults_of(log: RunLog) -> list[dict[str, Any]]:
    """Where a rank has logged that a worker of its node was lost and replaced."""
    found = []
    for rank, by_step in log.lost.items():
        before = 0
        for step in sorted(by_step):
            if by_step[step] > before:
                found.append(
                    {"step": step, "text": f"rank {rank}: {by_step[step] - before} worker(s) lost and replaced"}
                )
            before = by_step[step]  # a job that was started again counts from 0
    return sorted(found, key=lambda one: (one["step"], one["text"]))


def _add_losses_of_policy(log: RunLog, records: list[StepRecord]) -> None:
    """What `loader.report` was told, where no other log has the step."""
    for record in records:
        for name, (total, tokens) in record.losses.items():
            if tokens:
                log.losses.setdefault(name, {}).setdefault(record.step, total / tokens)


def _stop(arguments: argparse.Namespace, of_state: int | None, of_log: int | None, of_policy: int) -> int:
    """The step behind the last one to look at."""
    known = of_state or max((of_log or -1) + 1, of_policy)
    stop = int(arguments.steps or known)
    if stop <= arguments.start:
        raise OptionError(
            f"no step from --start {arguments.start} on is known: give --state FILE, --log FILE or --steps N"
        )
    return stop


def _series(by_name: dict[str, dict[int, float]], steps: RunSteps) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(step, round(by_step[step], 6)) for step in sorted(by_step) if steps.first <= step < steps.stop]
        for name, by_step in sorted(by_name.items())
    }


class _Details:
    """Texts and items of steps, by the catalog that the run had at each."""

    def __init__(self, arguments: argparse.Namespace, steps: RunSteps) -> None:
        self._arguments, self._steps = arguments, steps
        self._directory = recipe_directory(arguments.recipe)
        self._readers: dict[int, tuple[Segment, DocumentReader]] = {}

    def __call__(self, step: int) -> dict[str, Any]:
        plan, segment = self._steps.plan(step)
        if id(segment) not in self._readers:
            part = segment.part
            reader = DocumentReader(
                segment.catalog,
                self._directory,
                tokenizer=self._arguments.tokenizer,
                maps=maps_of(part.sources),
                seed=part.seed,
            )
            self._readers[id(segment)] = segment, reader.__enter__()
        samples = list(range(min(plan.num_samples, MOST_SAMPLES)))
        told = "".join(html_of_samples(plan, segment.catalog, samples, self._readers[id(segment)][1]))
        if len(samples) < plan.num_samples:
            told = f"<p>The first {len(samples)} of {count_text(plan.num_samples)} samples:</p>\n{told}"
        return {"html": told}

    def close(self) -> None:
        for _, reader in self._readers.values():
            reader.__exit__(None, None, None)


@contextmanager
def _details(arguments: argparse.Namespace, steps: RunSteps) -> Iterator[_Details]:
    details = _Details(arguments, steps)
    try:
        yield details
    finally:
        details.close()


def _serve(
    arguments: argparse.Namespace,
    address: tuple[str, int],
    values: dict[str, Any],
    steps: RunSteps,
    details: _Details,
) -> ExitCode:
    def step_of(step: int) -> dict[str, Any] | None:
        return details(step) if steps.first <= step < steps.stop else None

    def page() -> str:
        return html_text(_title(arguments), parts(values), style=style())

    server = PageServer(address, page, step_of, LiveLook(arguments.recipe).values)
    if arguments.json:
        print_json({"url": server.url})
    else:
        print(f"{server.url}\nCtrl-C ends it")
    sys.stdout.flush()
    server.run()
    return ExitCode.OK


def _words(arguments: argparse.Namespace, stop: int) -> str:
    """The words that make this page again, behind the verb."""
    words = [str(arguments.subject), "--steps", str(stop)]
    of_run = () if arguments.state == arguments.subject else ("state",)
    of_recipe = () if arguments.recipe in (arguments.subject, arguments.subject / RECIPE) else ("recipe",)
    for name in (*of_recipe, *of_run, "accept_edit", "decisions", "tokenizer"):
        if getattr(arguments, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    for path in arguments.log:
        words += ["--log", str(path)]
    return shlex.join(words)


def _title(arguments: argparse.Namespace) -> str:
    return f"Run of {arguments.recipe.name}"


def _listed(steps: list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(count_text, steps))}"
