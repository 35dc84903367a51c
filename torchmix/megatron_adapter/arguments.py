"""The flags that torchmix adds to Megatron's command line.

In: Megatron's argument parser, and whatever provider of extra arguments the script had before. Out: the parser with the
flags of torchmix. Must hold: without `--data-recipe` nothing of Megatron changes, not even a default; with it, Megatron
takes its iterators from outside (`--dataloader-type external`) and makes no dense attention masks.

Megatron parses its arguments long after a script has chosen its functions, so `enabled()` looks at the command line
itself. Megatron's parser takes no abbreviations, hence there is nothing to guess.

The signature that Megatron expects of an `extra_args_provider`, parser in and parser out, has been the same from core
0.16 (argument of `pretrain`) to core 0.20 (argument of `parse_and_validate_args`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import get_args

from torchmix.parallel.places.leaders import LeaderChoice

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

RECIPE_FLAG = "--data-recipe"


def enabled(arguments: Sequence[str] | None = None) -> bool:
    """Whether the command line names a recipe.

    Args:
        arguments: Stands in for `sys.argv[1:]`.
    """
    given = sys.argv[1:] if arguments is None else arguments
    return any(argument == RECIPE_FLAG or argument.startswith(f"{RECIPE_FLAG}=") for argument in given)


def extra_args(previous: ExtraArguments | None = None) -> ExtraArguments:
    """A provider of extra arguments for Megatron: those of `previous`, and those of torchmix.

    Args:
        previous: The provider that the script had; None if it had none.

    Returns:
        What to give Megatron as `extra_args_provider`.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if previous is not None:
            parser = previous(parser)
        return _with_flags(parser)

    return provide


def _with_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="torchmix")
    group.add_argument(
        RECIPE_FLAG,
        default=None,
        metavar="YAML",
        help="Recipe of the data. It takes the place of --data-path and of Megatron's data loader.",
    )
    group.add_argument(
        "--data-loaders",
        default=None,
        metavar="WHERE",
        help="Where data are planned and read, in the place of the recipe's `loaders`: `node`, in a process of the "
        "node, or `in_process`, in threads of each leader. Other keys of `loaders` follow as `node,memory=8GiB`.",
    )
    group.add_argument(
        "--data-accept-edit",
        default=None,
        metavar="WORD",
        help="Go on with a recipe that was edited since the checkpoint: the word that the refusal, or torchmix diff, "
        "names.",
    )
    group.add_argument(
        "--data-leaders",
        choices=get_args(LeaderChoice),
        default="replica",
        help="Which ranks read: one of each replica, one of each replica in each node, or one of each pipeline stage.",
    )
    group.add_argument(
        "--data-look-ahead",
        type=int,
        default=2,
        metavar="STEPS",
        help="Finished global batches that may wait on each rank.",
    )
    group.add_argument(
        "--data-patience",
        type=float,
        default=None,
        metavar="SECONDS",
        help="How long a rank of another host, or the job's store, may be silent before it counts as lost; 3 or more, "
        "11 if not given.",
    )
    group.add_argument(
        "--data-start-fresh",
        action="store_true",
        help="Load a checkpoint that has no state of torchmix: the data begin at the step that Megatron's consumed "
        "samples say. To move a run to torchmix, or to another recipe, on purpose.",
    )
    group.add_argument(
        "--no-data-source-loss",
        action="store_false",
        dest="data_source_loss",
        help="Do not report the loss of each source at every --log-interval.",
    )
    if enabled():
        parser.set_defaults(dataloader_type="external", create_attention_mask_in_dataloader=False)
    return parser
