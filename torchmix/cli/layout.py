"""The options that say how large a job is: `--dp` or `--world`, `--tp`, `--cp`, `--pp` and `--micro-batch-size`.

In: the arguments of a verb that plans. Out: a `Layout`. Must hold: what is given twice must agree. Cost: none.
"""

from __future__ import annotations

import argparse

from torchmix.cli.terminal import at_least
from torchmix.errors import TopologyError
from torchmix.parallel.layout import Layout
from torchmix.recipe.parts import Part


def add_layout(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--dp", type=at_least(1), metavar="D", help="data-parallel size (default 1)")
    sizes.add_argument("--world", type=at_least(1), metavar="N", help="all ranks of the job, in the place of --dp")
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        parser.add_argument(
            f"--{name}", type=at_least(1), default=1, metavar="N", help=f"{meaning}-parallel size (default 1)"
        )
    parser.add_argument(
        "--micro-batch-size", type=at_least(1), default=1, metavar="B", help="samples of a microbatch (default 1)"
    )


def layout_of_arguments(arguments: argparse.Namespace, part: Part) -> Layout:
    """The grid that samples, and items of modules, are placed on.

    Raises:
        TopologyError: The ranks do not divide into replicas.
    """
    replica = arguments.tp * arguments.cp * arguments.pp
    dp = arguments.dp or 1
    if arguments.world is not None:
        dp, rest = divmod(arguments.world, replica)
        if rest or not dp:
            raise TopologyError(
                f"--world {arguments.world} does not divide by tp {arguments.tp} x cp {arguments.cp} x pp "
                f"{arguments.pp} = {replica} ranks of a replica"
            )
    return Layout(
        dp=dp,
        micro_batch_size=arguments.micro_batch_size,
        tp=arguments.tp,
        cp=arguments.cp,
        pp=arguments.pp,
        broadcast_at=part.balance.broadcast_at,
    )
