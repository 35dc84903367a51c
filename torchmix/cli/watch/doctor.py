"""`torchmix doctor`: what dead runs of this user have left on this machine, and with --clean its removal.

Cost: a look at this user's processes.
"""

from __future__ import annotations

import argparse

from torchmix.boards.find import clean, leftovers
from torchmix.cli.terminal import ExitCode, print_json

HELP = "find, and with --clean remove, what dead runs have left on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    parser.add_argument("--clean", action="store_true", help="end these processes and remove these folders")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Find, and remove if asked to."""
    found = leftovers()
    gone = {one for one in found if arguments.clean and clean(one)}
    if arguments.json:
        print_json(
            {
                "leftovers": [
                    {"kind": one.kind, "what": one.what, "pid": one.pid, "path": one.path, "is_removed": one in gone}
                    for one in found
                ]
            }
        )
    elif not found:
        print("nothing is left of runs that have ended")
    else:
        for one in found:
            print(f"{'removed: ' if one in gone else ''}{one.what}")
        if not arguments.clean:
            print("torchmix doctor --clean removes them")
    return ExitCode.OK if len(gone) == len(found) else ExitCode.FINDINGS
