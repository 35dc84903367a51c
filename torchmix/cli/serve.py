"""`torchmix serve`: loaders of a recipe, for the trainers of a job or of several.

In: a recipe with its catalog and files. Out: loader processes that answer until Ctrl-C or SIGTERM. Must hold: one that
ends by itself is started again; nothing is left behind. Cost: a reader each; they share the recipe's `read.cache`.
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from torchmix.boards.board import own_board
from torchmix.cli.terminal import ExitCode, at_least, print_json
from torchmix.errors import OptionError
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.source.documents import PARTS
from torchmix.service.keys import server_keys
from torchmix.service.main import LoaderStart
from torchmix.service.pool import LoaderPool, starts_of

HELP = "run loaders that trainers ask for their documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside RECIPE and --json."""
    parser.add_argument(
        "--bind", required=True, metavar="ENDPOINT", help="tcp://ADDRESS:PORT of the first one; port 0: any free ports"
    )
    parser.add_argument(
        "--processes", type=at_least(1), default=1, metavar="N", help="loaders, at ports that count up (default 1)"
    )
    parser.add_argument("--keys", type=Path, metavar="DIR", help="keys, which torchmix keys made")
    parser.add_argument("--register", type=Path, metavar="DIR", help="a shared folder where trainers find the loaders")
    parser.add_argument(
        "--metrics",
        type=at_least(0),
        default=0,
        metavar="PORT",
        help="figures for Prometheus, from this port on from this one on",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """Serve until a signal.

    Raises:
        OptionError: An address is reached from other machines, and there are no keys; or it is taken.
        TorchmixError: The recipe or the catalog is wrong.
    """
    recipe, folder = recipe_and_directory("serve", arguments.recipe, None)
    if not arguments.bind.startswith("tcp://"):
        raise OptionError(f"--bind {arguments.bind}: write tcp://ADDRESS:PORT")
    if arguments.keys is not None:
        server_keys(arguments.keys)  # before anything is started
    start = LoaderStart(
        parts={name: part_of(recipe, name) for name in PARTS if has_part(recipe, name)},
        base=str(folder),
        catalog_folder=str(folder / recipe.catalog),
        cache_bytes=parse_bytes(recipe.read.cache, where="read.cache"),
        bind=arguments.bind,
        keys="" if arguments.keys is None else str(arguments.keys.absolute()),
        register="" if arguments.register is None else str(arguments.register.absolute()),
        metrics_port=arguments.metrics,
    )
    is_over = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    own_board.open("serve", run=f"serve {Path(arguments.recipe).absolute()}")
    pool = LoaderPool(starts_of(start, arguments.processes))
    try:
        if arguments.json:
            print_json({"endpoints": pool.endpoints})
        else:
            print(f"{len(pool.endpoints)} loaders listen at {', '.join(pool.endpoints)}", flush=True)
        while not is_over.wait(1.0):
            pass
    finally:
        pool.close()
        signal.signal(signal.SIGTERM, before)
    return ExitCode.OK
