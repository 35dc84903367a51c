"""`torchmix plan`: the steps of a run before it runs.

In: a recipe with its catalog, a range of steps, and a layout. Out: a table of what each source gives, how full and
how balanced the steps are; with `--out`, every piece as Parquet. Must hold: what is shown is what a training run gets,
since the same planner makes it. Cost: planning of all steps from 0 on, since the order is a fold; no data is read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from torchmix.catalog.open_part import open_part
from torchmix.cli.groups import group_values, print_groups
from torchmix.cli.layout import add_layout, layout_of_arguments
from torchmix.cli.plan.loaders import add_loaders, show_loaders
from torchmix.cli.plan.report.figures import check_charts
from torchmix.cli.plan.report.numbers import ReportNumbers
from torchmix.cli.plan.report.page import write_report
from torchmix.cli.plan.simulate import (
    DEFAULT_STEPS,
    add_simulate,
    print_simulation,
    simulated_part,
    simulation_of,
    simulation_values,
)
from torchmix.cli.plan.summary import PlanSummary, print_summary
from torchmix.cli.plan.tree import add_tree, tree_lines, tree_of, tree_values
from torchmix.cli.run.decisions import add_decisions
from torchmix.cli.run.second_interpreter import difference_elsewhere
from torchmix.cli.run.steps import add_state, run_fold, state_of
from torchmix.cli.terminal import ExitCode, add_explain, add_part, at_least, check_folder, print_json, progress_bar
from torchmix.errors import OptionError, PlanError, SourceExhausted
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.planner import Planner
from torchmix.planner.stream_order import epoch_tokens
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import part_of
from torchmix.recipe.ramp import length_of_step, most_length, samples_of_step
from torchmix.steps.history.run_fold import RunFold
from torchmix.steps.replay.tables import paths_of
from torchmix.steps.replay.write import check_plan_folder, write_plan_files
from torchmix.steps.state import LoaderState

HELP = "show what the steps of a run will hold"

OF_STEPS = ("state", "accept_edit", "decisions", "out", "report", "simulate")
"""Options of planned steps, of which --tree and --loaders have none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside RECIPE and --json."""
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="number of steps to plan")
    add_part(parser)
    parser.add_argument("--one-pass", action="store_true", help="every document once; --steps may then be left out")
    parser.add_argument("--start", type=at_least(0), metavar="S", help="first step (default 0, or the state's)")
    add_layout(parser)
    add_state(parser, "plan the steps of its run from there on")
    add_decisions(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the plan here, as Parquet, to look at or to replay"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write a page here: heat maps, lengths, mixture, predicted times"
    )
    add_tree(parser)
    add_loaders(parser)
    add_simulate(parser)
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Plan, and print or write the steps.

    Raises:
        OptionError: An option would do nothing.
        TorchmixError: Whatever keeps a step from being planned; nothing is written then.
    """
    one_pass = arguments.one_pass
    _check_options(arguments)
    if arguments.tree:
        return _show_tree(arguments)
    if arguments.loaders:
        return show_loaders(arguments)
    if arguments.report is not None:
        check_charts()
        check_folder("--report", arguments.report)
    if arguments.out is not None:
        check_plan_folder(arguments.out)
    if arguments.steps is None and arguments.simulate:
        arguments.steps = DEFAULT_STEPS
    if arguments.steps is None and not one_pass:
        raise OptionError("give --steps N, or --one-pass; --tree, --loaders and --simulate need neither")
    recipe = load_recipe(arguments.recipe)
    part = simulated_part(arguments, part_of(recipe, arguments.part, one_pass=one_pass))
    folder = recipe_directory(arguments.recipe) / recipe.catalog
    catalog = open_part(folder, part)
    layout = layout_of_arguments(arguments, part)
    simulation = simulation_of(part, layout) if arguments.simulate else None
    state = state_of(arguments, part, catalog)
    start = _start(arguments, state)
    directory = recipe_directory(arguments.recipe)
    fold = run_fold(arguments, part, catalog, directory=directory, layout=layout, state=state, first=start)
    planners = fold.planners()
    summary = PlanSummary(_epoch_tokens(planners), fold.planner.epochs_before(fold.cursor.position))
    numbers = ReportNumbers(backbone_cost(part), most_length(part.batch)) if arguments.report is not None else None
    stop = sys.maxsize if arguments.steps is None else start + arguments.steps
    has_ended, last_step = False, None
    with ExitStack() as stack:
        total = 0 if arguments.steps is None else stop
        bar = stack.enter_context(
            progress_bar(total, unit="step", title="planning", silent=arguments.json or arguments.quiet)
        )
        files = None
        if arguments.out is not None:
            _check_one_recipe(fold, start, stop)
            files = stack.enter_context(write_plan_files(arguments.out, planners[-1], catalog.fingerprint))
        for step in range(fold.cursor.step, stop):
            began = time.perf_counter()
            try:
                before, plan = fold.before(), fold.plan()
            except PlanError as error:  # what there is before it is still worth a look
                if has_ended := one_pass and step > start and isinstance(error, SourceExhausted):
                    break
                bar.close()
                if not arguments.json:
                    print_summary({"dp": layout.dp, **summary.values()})
                raise
            if step < start:
                summary.pass_over(plan)
            else:
                seconds = time.perf_counter() - began
                summary.add(plan, fold.planner.shares_asked(before, fold.cursor), seconds)
                if simulation is not None:
                    simulation.add(plan)
                if numbers is not None:
                    numbers.add(plan)
                if files is not None:
                    files.add(plan, before, fold.cursor)
                last_step = before, plan
            bar.update()
        differs = None
        if last_step is not None and fold.planner.part == part:  # else a recipe of before has planned it
            differs = difference_elsewhere(part, catalog, layout, last_step[0].order_digest, last_step[1])
        if state is not None:
            fold.skip_to(state.step)  # whose digest tells whether these are the steps of its run
    values = {
        "recipe": str(arguments.recipe),
        "recipe_fingerprint": recipe_fingerprint(part),
        "catalog_fingerprint": catalog.fingerprint,
        "part": arguments.part,
        "has_ended": has_ended,
        "edits": list(fold.edits),
        **asdict(layout),
        **summary.values(),
        "findings": [] if differs is None else [{"where": differs[0], "message": differs[1]}],
        "groups": group_values(part, summary.shares(), summary.delivered()),
        "files": [str(path) for path in paths_of(arguments.out)] if arguments.out is not None else [],
    }
    if simulation is not None:
        values["simulation"] = simulation_values(simulation, part, layout, arguments)
    if numbers is not None:
        write_report(arguments.report, values, numbers)
    if arguments.json:
        print_json(values)
        return ExitCode.OK if differs is None else ExitCode.FINDINGS
    of_part = arguments.recipe if arguments.part == "train" else f"{arguments.part} of {arguments.recipe}"
    last = values["first_step"] + values["num_steps"] - 1
    sizes = [samples_of_step(part.batch, step) for step in (*range(start, last), last)]
    samples = str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
    first_length, last_length = (length_of_step(part.batch, step) for step in (start, last))
    lengths = str(first_length) if first_length == last_length else f"{first_length} to {last_length}"
    print(
        f"steps {start} to {last} of {of_part}: {samples} samples x {lengths} tokens, "
        f"dp {layout.dp}, micro-batch size {layout.micro_batch_size}\n"
    )
    print_summary(values, explain=arguments.explain)
    print_groups(values["groups"], explain=arguments.explain)
    if simulation is not None:
        print_simulation(values["simulation"], explain=arguments.explain)
    if fold.edits:
        print(f"\nedited at step {', '.join(map(str, fold.edits))}: each step is of the recipe that the run had then")
    if has_ended:
        print(f"\none pass: after step {last} every document has been given once")
    if arguments.out is not None:
        print(f"\nwrote {', '.join(path.name for path in paths_of(arguments.out))} to {arguments.out}")
    if arguments.report is not None:
        print(f"\nwrote {arguments.report}")
    if differs is not None:
        print(f"\nfinding: {differs[0]}: {differs[1]}")
    return ExitCode.OK if differs is None else ExitCode.FINDINGS


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that would silently do nothing."""
    views = [name for name in ("tree", "loaders") if getattr(arguments, name)]
    if len(views) == 2:
        raise OptionError("--tree and --loaders show different things; give one of them")
    given = [name for name in OF_STEPS if getattr(arguments, name) not in (None, False)]
    if views and given:
        option = f"--{given[0].replace('_', '-')}"
        raise OptionError(f"--{views[0]} plans no steps, so {option} would do nothing; leave one of them out")


def _show_tree(arguments: argparse.Namespace) -> ExitCode:
    part = part_of(load_recipe(arguments.recipe), arguments.part, one_pass=arguments.one_pass)
    tree = tree_of(arguments, part)
    if arguments.json:
        print_json({"recipe": str(arguments.recipe), **tree_values(tree)})
    else:
        print("\n".join(tree_lines(tree)))
    return ExitCode.OK


def _start(arguments: argparse.Namespace, state: LoaderState | None) -> int:
    """The first step to show."""
    if arguments.start is None:
        return 0 if state is None else state.step
    return int(arguments.start)


def _check_one_recipe(fold: RunFold, start: int, stop: int) -> None:
    """Refuse files of steps that several recipes have made: they could not be replayed."""
    inside = [step for step in fold.edits if start < step < stop]
    if inside or any(stop <= step for step in fold.edits):
        raise OptionError(
            f"--out: the run was edited at step {', '.join(map(str, inside or fold.edits))}, and a plan's files are "
            f"of one recipe; give --start {fold.edits[-1]}, or plan earlier steps with the recipe that the run had then"
        )


def _epoch_tokens(planners: Sequence[Planner]) -> dict[str, int]:
    """Tokens of an epoch of each source, as it was last."""
    return {
        name: epoch_tokens(order, one.sizes, one.denied)
        for one in planners
        for name, order in zip(one.streams, one.orders, strict=True)
    }
