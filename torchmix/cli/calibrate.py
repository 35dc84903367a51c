"""`torchmix calibrate`: the cost of a sample from timings of one's own.

No coefficient is below 0. Cost: one pass over the file.

Seconds are fitted by per_token x tokens + per_pair x sum(lengths^2), relative to each timing, so that short samples
count as much as long ones. What a step takes beside its samples is not in it: time a forward and backward alone.

Timings of runs of ranks say how many shared the documents. Each rank computes its part of both sums, pays per_exchanged
for each token that it gets from another rank, and per_microbatch once.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from torchmix.cli.terminal import ExitCode, add_recipe, print_json
from torchmix.errors import OptionError
from torchmix.planner.contexts import exchange_of
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import most_length

HELP = "fit the cost of a sample to timings"
SCALE = 1 << 20
"""The larger coefficient, for the tokens of a sample of `batch.length`; it leaves costs of a batch below 63 bits."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One measured sample, or microbatch of a run of ranks."""

    tokens: int
    pairs: int
    """Sum of the squares of its documents' lengths."""
    seconds: float
    ranks: int = 1
    """That shared it."""

    def amounts(self, num_coefficients: int) -> tuple[float, ...]:
        """What a rank computes of tokens and pairs, the tokens that it gets from other ranks, and one microbatch."""
        exchanged = self.tokens / self.ranks * (self.ranks - 1)
        return (self.tokens / self.ranks, self.pairs / self.ranks, exchanged, 1.0)[:num_coefficients]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    parser.add_argument(
        "timings", type=Path, metavar="TIMINGS", help="a CSV file with columns lengths and seconds, and perhaps ranks"
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """Fit, and print the keys of the recipe.

    Raises:
        OptionError: A line of the file is no timing, or there are too few.
    """
    part = part_of(load_recipe(arguments.recipe), "train")
    timings, of_runs = timings_of(arguments.timings)
    found = integers(fitted(timings, 4 if of_runs else 2), length=most_length(part.batch))
    unit = _unit(timings, found)
    errors = [_error(timing, found, unit) for timing in timings]
    by_recipe = _of_recipe(part, of_runs)
    of_model = [_error(timing, by_recipe, _unit(timings, by_recipe)) for timing in timings]
    values = {
        **dict(zip(KEYS, found, strict=False)),
        "num_timings": len(timings),
        "largest_error": max(map(abs, errors)),
        "mean_error": sum(map(abs, errors)) / len(errors),
        "largest_error_of_recipe": max(map(abs, of_model)),
    }
    if arguments.json:
        print_json(values)
        return ExitCode.OK
    of_context = f", context: {{per_exchanged: {found[2]}, per_microbatch: {found[3]}}}" if of_runs else ""
    print(f"balance: {{cost: {{per_token: {found[0]}, per_pair: {found[1]}}}{of_context}}}\n")
    for timing, error in zip(timings, errors, strict=True):
        shared = f"  {timing.ranks:>4} rank(s)" if of_runs else ""
        print(f"{timing.tokens:>9} tokens{shared}  {timing.seconds:.6g} s  {error:+.1%}")
    print(
        f"\n{len(timings)} timings: off by {values['mean_error']:.1%} on average, {values['largest_error']:.1%} at "
        f"most; with the recipe as it is {values['largest_error_of_recipe']:.1%} at most"
    )
    return ExitCode.OK


KEYS = ("per_token", "per_pair", "per_exchanged", "per_microbatch")
"""The coefficients, in their order."""


def _of_recipe(part: Part, of_runs: bool) -> tuple[int, ...]:
    """The coefficients of the recipe as it is."""
    cost = backbone_cost(part)
    context = part.balance.context
    if not of_runs:
        return cost.per_token, cost.per_pair
    exchanged = None if context is None else context.per_exchanged
    if exchanged is None:
        exchanged = exchange_of(cost)
    return cost.per_token, cost.per_pair, exchanged, 0 if context is None else context.per_microbatch


def timings_of(path: Path) -> tuple[list[Timing], bool]:
    """The timings of a file, and whether they are of runs of ranks.

    Raises:
        OptionError: There is no such file, a line is no timing, or there are too few.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if not {"lengths", "seconds"} <= set(rows.fieldnames or ()):
                raise OptionError(
                    f"{path}: the first line names the columns lengths and seconds, not {rows.fieldnames}"
                )
            of_runs = "ranks" in (rows.fieldnames or ())
            timings = [_timing(row, f"{path}, line {rows.line_num}") for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: {error}") from error
    num_different = len({timing.amounts(4) for timing in timings})
    if num_different < 2:
        raise OptionError(f"{path}: two coefficients need timings of at least two different samples")
    if of_runs and (num_different < 4 or len({timing.ranks for timing in timings}) < 2):
        raise OptionError(
            f"{path}: four coefficients need timings of at least four different microbatches, and runs of at least two "
            f"numbers of ranks"
        )
    return timings, of_runs


def fitted(timings: Sequence[Timing], num_coefficients: int) -> tuple[float, ...]:
    """Seconds per token, per pair, per exchanged token and per microbatch, or the first of these, that lie closest to
    the timings, relative to each; none below 0.

    Of all choices of coefficients that are not 0 the best one is taken: the least squares of each are a few sums.
    """
    amounts = np.array([timing.amounts(num_coefficients) for timing in timings])
    relative = amounts / np.array([timing.seconds for timing in timings])[:, None]
    scale = np.linalg.norm(relative, axis=0)
    best, found = math.inf, np.zeros(num_coefficients)
    for count in range(1, num_coefficients + 1):
        for chosen in map(list, itertools.combinations(range(num_coefficients), count)):
            if not scale[chosen].all():
                continue
            part, _, rank, _ = np.linalg.lstsq(relative[:, chosen] / scale[chosen], np.ones(len(timings)), rcond=1e-9)
            error = float(np.square(relative[:, chosen] / scale[chosen] @ part - 1).sum())
            if rank == count and part.min() >= 0 and error < best * (1 - 1e-9):
                best, found = error, np.zeros(num_coefficients)
                found[chosen] = part / scale[chosen]
    return tuple(found.tolist())


def integers(coefficients: Sequence[float], *, length: int) -> tuple[int, ...]:
    """The coefficients as integers: of some 20 bits for a token, and of at least three digits for a pair where that can
    be."""
    per_token, per_pair = coefficients[:2]
    scale = SCALE / max(per_token, per_pair * length, *(each / length for each in coefficients[2:]))
    if per_pair > 0:
        scale = max(scale, min(1000 / per_pair, scale * 1024))
    return tuple(round(each * scale) for each in coefficients)


def _timing(row: dict[str, str], where: str) -> Timing:
    try:
        lengths = [int(word) for word in row["lengths"].split()]
        seconds = float(row["seconds"])
        ranks = int(row.get("ranks", 1))
    except (TypeError, ValueError) as error:
        raise OptionError(f"{where}: {row} is no timing; as 512 2048 in lengths, and 0.031 in seconds") from error
    if not lengths or min(lengths) < 1 or not 0 < seconds < math.inf:
        raise OptionError(f"{where}: lengths are 1 or more, and seconds above 0")
    if ranks < 1:
        raise OptionError(f"{where}: ranks are 1 or more")
    pairs = sum(length * length for length in lengths)
    return Timing(tokens=sum(lengths), pairs=pairs, seconds=seconds, ranks=ranks)


def _unit(timings: Sequence[Timing], cost: Sequence[int]) -> float:
    """Seconds of one unit of cost: what makes the relative errors sum to 0."""
    ratios = [timing.seconds / _cost(timing, cost) for timing in timings]
    return len(ratios) / sum(1 / ratio for ratio in ratios)


def _cost(timing: Timing, cost: Sequence[int]) -> float:
    return sum(price * amount for price, amount in zip(cost, timing.amounts(len(cost)), strict=True))


def _error(timing: Timing, cost: Sequence[int], unit: float) -> float:
    """How far a timing is predicted off, relative to it."""
    return unit * _cost(timing, cost) / timing.seconds - 1
