"""`torchmix calibrate`: the cost of a sample from timings of one's own.

No coefficient is below 0. Cost: one pass over the file.

Seconds are fitted by per_token x tokens + per_pair x sum(lengths^2), relative to each timing, so that short samples
count as much as long ones. What a step takes beside its samples is not in it: time a forward and backward alone.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from torchmix.cli.terminal import ExitCode, add_recipe, print_json
from torchmix.errors import OptionError
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of

HELP = "fit the cost of a sample to timings"
SCALE = 1 << 20
"""The larger coefficient, for the tokens of a sample of `batch.length`; it leaves costs of a batch below 63 bits."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One measured sample."""

    tokens: int
    pairs: int
    """Sum of the squares of its documents' lengths."""
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    parser.add_argument("timings", type=Path, metavar="TIMINGS", help="a CSV file with columns lengths and seconds")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Fit, and print the keys of the recipe.

    Raises:
        OptionError: A line of the file is no timing, or there are too few.
    """
    part = part_of(load_recipe(arguments.recipe), "train")
    timings = timings_of(arguments.timings)
    per_token, per_pair = fitted(timings)
    found = integers(per_token, per_pair, length=part.batch.length)
    unit = _unit(timings, found)
    errors = [_error(timing, found, unit) for timing in timings]
    model = backbone_cost(part)
    by_model = (model.per_token, model.per_pair)
    of_model = [_error(timing, by_model, _unit(timings, by_model)) for timing in timings]
    values = {
        "per_token": found[0],
        "per_pair": found[1],
        "num_timings": len(timings),
        "largest_error": max(map(abs, errors)),
        "mean_error": sum(map(abs, errors)) / len(errors),
        "largest_error_of_recipe": max(map(abs, of_model)),
    }
    if arguments.json:
        print_json(values)
        return ExitCode.OK
    print(f"balance: {{cost: {{per_token: {found[0]}, per_pair: {found[1]}}}}}\n")
    for timing, error in zip(timings, errors, strict=True):
        print(f"{timing.tokens:>9} tokens  {timing.seconds:.6g} s  {error:+.1%}")
    print(
        f"\n{len(timings)} timings: off by {values['mean_error']:.1%} on average, {values['largest_error']:.1%} at "
        f"most; with the recipe as it is {values['largest_error_of_recipe']:.1%} at most"
    )
    return ExitCode.OK


def timings_of(path: Path) -> list[Timing]:
    """The timings of a file.

    Raises:
        OptionError: There is no such file, a line is no timing, or there are fewer than two.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if not {"lengths", "seconds"} <= set(rows.fieldnames or ()):
                raise OptionError(
                    f"{path}: the first line names the columns lengths and seconds, not {rows.fieldnames}"
                )
            timings = [_timing(row, f"{path}, line {rows.line_num}") for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: {error}") from error
    if len({(timing.tokens, timing.pairs) for timing in timings}) < 2:
        raise OptionError(f"{path}: two coefficients need timings of at least two different samples")
    return timings


def fitted(timings: Sequence[Timing]) -> tuple[float, float]:
    """Seconds per token and per pair that lie closest to the timings, relative to each; none below 0."""
    rows = [(timing.tokens / timing.seconds, timing.pairs / timing.seconds) for timing in timings]
    tt, tp, pp = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    t, p = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = tt * pp - tp * tp
    per_token, per_pair = (t * pp - p * tp, p * tt - t * tp)
    if determinant <= 1e-12 * tt * pp or per_pair <= 0:
        return t / tt, 0.0
    if per_token <= 0:
        return 0.0, p / pp
    return per_token / determinant, per_pair / determinant


def integers(per_token: float, per_pair: float, *, length: int) -> tuple[int, int]:
    """The coefficients as integers of some 20 bits for a token, and of at least three digits where that can be."""
    scale = SCALE / max(per_token, per_pair * length)
    if per_pair > 0:
        scale = max(scale, min(1000 / per_pair, scale * 1024))
    return round(per_token * scale), round(per_pair * scale)


def _timing(row: dict[str, str], where: str) -> Timing:
    try:
        lengths = [int(word) for word in row["lengths"].split()]
        seconds = float(row["seconds"])
    except (TypeError, ValueError) as error:
        raise OptionError(f"{where}: {row} is no timing; as 512 2048 in lengths, and 0.031 in seconds") from error
    if not lengths or min(lengths) < 1 or not 0 < seconds < math.inf:
        raise OptionError(f"{where}: lengths are 1 or more, and seconds above 0")
    return Timing(tokens=sum(lengths), pairs=sum(length * length for length in lengths), seconds=seconds)


def _unit(timings: Sequence[Timing], cost: tuple[int, int]) -> float:
    """Seconds of one unit of cost: what makes the relative errors sum to 0."""
    ratios = [timing.seconds / (cost[0] * timing.tokens + cost[1] * timing.pairs) for timing in timings]
    return len(ratios) / sum(1 / ratio for ratio in ratios)


def _error(timing: Timing, cost: tuple[int, int], unit: float) -> float:
    """How far a timing is predicted off, relative to it."""
    return unit * (cost[0] * timing.tokens + cost[1] * timing.pairs) / timing.seconds - 1
