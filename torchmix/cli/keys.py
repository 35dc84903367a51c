"""`torchmix keys`: make the keys of loaders and of their clients.

No key is replaced, and no secret is printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmix.cli.terminal import ExitCode, at_least, print_json
from torchmix.service.keys import write_keys
from torchmix.service.server import new_pair

HELP = "make the keys of shared loaders and of their clients"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--clients", type=at_least(1), default=1, metavar="N", help="clients, each with a key of its own (default 1)"
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """Write the keys.

    Raises:
        OptionError: The folder has files.
    """
    write_keys(arguments.folder, new_pair, num_clients=arguments.clients)
    if arguments.json:
        print_json({"folder": str(arguments.folder), "clients": arguments.clients})
    else:
        print(
            f"{arguments.folder}: keys of the loaders and of {arguments.clients} clients. Loaders need server.secret "
            "and client-*.public; a machine that trains needs server.public and one client-K.secret"
        )
    return ExitCode.OK
