"""`torchmix init`: a recipe for files that a team has, for a blend of Megatron's, or a demonstration.

In: files, folders, globs and URIs; or Megatron's data flags; or nothing but a folder. Out: a commented recipe, read
back before success is told, and a table of its sources. Must hold: nothing is overwritten without --force. Cost: that
of looking at the files: footers, first lines, lengths of an .idx.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmix.cli.init import demo, from_files, megatron
from torchmix.cli.terminal import ExitCode, add_explain, at_least
from torchmix.errors import OptionError

HELP = "write a recipe for data files, for a blend of Megatron's, or for a demonstration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    from_files.add_arguments(parser)
    megatron.add_arguments(parser)
    demo.add_arguments(parser)
    parser.add_argument("--seq-length", type=at_least(2), metavar="N", help="tokens of a sample")
    parser.add_argument("--global-batch-size", type=at_least(1), metavar="N", help="samples of a step, of all ranks")
    parser.add_argument("--split", help="of every source, as 99,1,0 (with Megatron's flags its default, 969, 30, 1)")
    parser.add_argument("--seed", type=at_least(0), default=1234, metavar="N", help="default 1234")
    parser.add_argument("--out", dest="recipe", type=Path, default=Path("recipe.yaml"), metavar="FILE")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Write the recipe.

    Raises:
        OptionError: Flags that say nothing, or two things, or a file that is there already.
        SourceUnreadable: Files that are missing, or cannot be read.
    """
    ways = {
        "files": bool(arguments.files),
        "--demo": arguments.demo is not None,
        "--from-megatron": megatron.has_blend(arguments),
    }
    given = [way for way, is_given in ways.items() if is_given]
    if not given:
        raise OptionError(
            "init needs to be told where data is: `torchmix init data/*.parquet` (files, folders, globs, hf:// and "
            "other URIs), a blend of Megatron's as --from-megatron takes it, or --demo for a small corpus"
        )
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} name different data; give one of them")
    if arguments.files:
        return from_files.run(arguments)
    return demo.run(arguments) if arguments.demo is not None else megatron.run(arguments)
