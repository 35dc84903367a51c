"""`torchmix show`: the text or the tokens of what training will see.

In: a recipe with its catalog, and rows of a source or a step. Out: on stdout what they hold, each piece with the file
and row that it is from. Must hold: what a document holds cannot act on the terminal. Cost: see show_rows.py and
show_step.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmix.catalog.open_part import open_part
from torchmix.cli.layout import add_layout
from torchmix.cli.run.decisions import add_decisions
from torchmix.cli.run.steps import add_state
from torchmix.cli.show.documents import DocumentReader
from torchmix.cli.show.page import write_page
from torchmix.cli.show.rows import print_row, rows_shown
from torchmix.cli.show.step import COLUMNS, numbers_of_samples, plan_of_step, print_sample, samples_shown
from torchmix.cli.terminal import ExitCode, add_explain, at_least, print_json, print_meanings
from torchmix.errors import OptionError
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import part_of
from torchmix.recipe.ramp import length_of_step
from torchmix.recipe.source.documents import PARTS
from torchmix.recipe.source.row_map import maps_of

HELP = "show the text or tokens of rows, or of a step"

OF_ROWS = ("row", "rows", "page")
OF_STEP = ("sample", "dp_rank", "microbatch", "state", "accept_edit", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside RECIPE and --json."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--source", metavar="NAME", help="show rows of this source, with --row, --rows or --page")
    what.add_argument("--step", type=at_least(0), metavar="N", help="show what this step gives to the model")
    rows = parser.add_argument_group("with --source").add_mutually_exclusive_group()
    rows.add_argument("--row", type=at_least(0), metavar="R", help="one row")
    rows.add_argument("--rows", type=_range, metavar="A:B", help="rows A to B - 1")
    rows.add_argument("--page", type=at_least(0), metavar="P", help="all rows of a page")
    step = parser.add_argument_group("with --step")
    step.add_argument("--sample", type=at_least(0), metavar="S", help="one sample of the global batch (default all)")
    step.add_argument("--dp-rank", type=at_least(0), metavar="R", help="samples of one data-parallel rank")
    step.add_argument("--microbatch", type=at_least(0), metavar="M", help="samples of one microbatch")
    add_layout(step)
    add_state(step, "of the run that is meant, to plan from")
    add_decisions(parser)
    step.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with texts and images, and who encodes them"
    )
    parser.add_argument("--part", choices=PARTS, default="train", help="part of the recipe (default train)")
    parser.add_argument("--tokens", action="store_true", help="show ids, too, where there is text")
    parser.add_argument("--tokenizer", metavar="T", help="shows ids as text: bytes, tiktoken:NAME or a tokenizer.json")
    parser.add_argument(
        "--characters", type=at_least(1), default=60, metavar="C", help="of both ends of a piece (default 60)"
    )
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Show rows or a step.

    Raises:
        TorchmixError: Something is not there, or cannot be planned or read.
    """
    _check_options(arguments)
    recipe = load_recipe(arguments.recipe)
    part = part_of(recipe, arguments.part)
    directory = recipe_directory(arguments.recipe)
    catalog = open_part(directory / recipe.catalog, part)
    if arguments.source is not None:
        rows = rows_shown(catalog, directory, arguments, maps=maps_of(part.sources), seed=part.seed)
        if arguments.json:
            print_json({"recipe": str(arguments.recipe), "rows": list(rows)})
            return ExitCode.OK
        for row in rows:
            print_row(row)
        return ExitCode.OK
    plan, segment = plan_of_step(part, catalog, directory, arguments)
    part, catalog = segment.part, segment.catalog
    maps, seed = maps_of(part.sources), part.seed
    if arguments.html is not None:
        numbers = numbers_of_samples(plan, arguments)
        with DocumentReader(catalog, directory, tokenizer=arguments.tokenizer, maps=maps, seed=seed) as reader:
            write_page(arguments.html, plan, catalog, numbers, reader)
        if not arguments.quiet:
            print(f"wrote {len(numbers)} samples of step {plan.step} to {arguments.html}")
        return ExitCode.OK
    samples = samples_shown(plan, catalog, directory, arguments, maps=maps, seed=seed)
    if arguments.json:
        about = {
            "recipe": str(arguments.recipe),
            "recipe_fingerprint": recipe_fingerprint(part),
            "catalog_fingerprint": catalog.fingerprint,
            "step": plan.step,
            "dp": plan.layout.dp,
            "micro_batch_size": plan.layout.micro_batch_size,
            "order_digest": plan.order_digest.hex(),
        }
        print_json({**about, "samples": list(samples)})
        return ExitCode.OK
    length = length_of_step(part.batch, plan.step)
    print(
        f"step {plan.step} of {arguments.recipe}: {plan.num_samples} samples x {length} tokens, digest "
        f"{plan.order_digest.hex()}"
    )
    for sample in samples:
        print_sample(sample, length=length, characters=arguments.characters)
    if arguments.explain:
        print_meanings(COLUMNS)
    return ExitCode.OK


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options of the other way to show, which would silently do nothing."""
    given = {name for name in (*OF_ROWS, *OF_STEP) if getattr(arguments, name) is not None}
    wrong = given & set(OF_STEP if arguments.source is not None else OF_ROWS)
    if wrong:
        option = f"--{min(wrong).replace('_', '-')}"
        raise OptionError(f"{option} goes with {'--step' if arguments.source is not None else '--source'}")
    if arguments.source is not None and not given:
        raise OptionError("--source needs --row R, --rows A:B or --page P")
    if arguments.sample is not None and (arguments.dp_rank is not None or arguments.microbatch is not None):
        raise OptionError("--sample names one sample; leave --dp-rank and --microbatch out")


def _range(text: str) -> tuple[int, int]:
    """A type of argument: A:B, half-open."""
    start, colon, stop = text.partition(":")
    try:
        first, end = int(start), int(stop)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no range, as 10:20") from error
    if not colon or first < 0 or end <= first:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of rows, as 10:20")
    return first, end
