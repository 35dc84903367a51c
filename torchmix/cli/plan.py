"""`torchmix plan`: the steps of a run before it runs.

In: a recipe with its catalog, a range of steps, and a layout. Out: a table of what each source gives, how full and
how balanced the steps are; with `--out`, every piece as Parquet. Must hold: what is shown is what a training run gets,
since the same planner makes it. Cost: planning of all steps from 0 on, since the order is a fold; no data is read.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

from torchmix.catalog.store import open_catalog
from torchmix.cli.forecast import epoch_tokens
from torchmix.cli.plan_files import paths_of, write_plan_files
from torchmix.cli.plan_summary import PlanSummary, print_summary
from torchmix.cli.terminal import ExitCode, at_least, print_json, progress_bar
from torchmix.errors import PlanError
from torchmix.planner.planner import open_planner
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.shares import parse_shares

HELP = "show what the steps of a run will hold"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside RECIPE and --json."""
    parser.add_argument("--steps", type=at_least(1), required=True, metavar="N", help="number of steps to plan")
    parser.add_argument("--start", type=at_least(0), default=0, metavar="S", help="first step (default 0)")
    parser.add_argument("--dp", type=at_least(1), default=1, metavar="D", help="data-parallel size (default 1)")
    parser.add_argument(
        "--micro-batch-size", type=at_least(1), default=1, metavar="B", help="samples of a microbatch (default 1)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write pieces.parquet and steps.parquet here")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Plan, and print or write the steps.

    Raises:
        TorchmixError: Whatever keeps a step from being planned; nothing is written then.
    """
    recipe = load_recipe(arguments.recipe)
    catalog = open_catalog(recipe, recipe_directory(arguments.recipe))
    planner = open_planner(recipe, catalog, dp=arguments.dp, micro_batch_size=arguments.micro_batch_size)
    shares = {name: float(share) for name, share in parse_shares(recipe).items()}
    summary = PlanSummary(shares, [epoch_tokens(recipe, catalog.sources[name].sizes) for name in shares])
    stop = arguments.start + arguments.steps
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(stop, unit="step", title="planning", as_json=arguments.json))
        files = stack.enter_context(write_plan_files(arguments.out)) if arguments.out is not None else None
        cursor = planner.start()
        for step in range(stop):
            began = time.perf_counter()
            try:
                plan, cursor = planner.step(cursor)
            except PlanError:  # the data ended: what there is before it is still worth a look
                bar.close()
                if not arguments.json:
                    print_summary({"dp": arguments.dp, **summary.values()})
                raise
            if step < arguments.start:
                summary.pass_over(plan)
            else:
                summary.add(plan, time.perf_counter() - began)
                if files is not None:
                    files.add(plan)
            bar.update()
    values = {
        "recipe": str(arguments.recipe),
        "recipe_fingerprint": recipe_fingerprint(recipe),
        "catalog_fingerprint": catalog.fingerprint,
        "dp": arguments.dp,
        "micro_batch_size": arguments.micro_batch_size,
        **summary.values(),
        "files": [str(path) for path in paths_of(arguments.out)] if arguments.out is not None else [],
    }
    if arguments.json:
        print_json(values)
        return ExitCode.OK
    batch = recipe.batch
    print(
        f"steps {arguments.start} to {stop - 1} of {arguments.recipe}: {batch.samples} samples x {batch.length} "
        f"tokens, dp {arguments.dp}, micro-batch size {arguments.micro_batch_size}\n"
    )
    print_summary(values)
    if arguments.out is not None:
        print(f"\nwrote {' and '.join(values['files'])}")
    return ExitCode.OK
