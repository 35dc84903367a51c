"""`torchmix doctor`: whether the native library is used here; what dead runs have left, and with --clean its removal.

Cost: a look at this user's processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence, Set

from torchmix.boards.find import Leftover, clean, leftovers
from torchmix.cli.terminal import ExitCode, print_json
from torchmix.native.load import native

HELP = "say whether the native library is used, and find, and with --clean remove, what dead runs have left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    parser.add_argument("--clean", action="store_true", help="end these processes and remove these folders")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Find, and remove if asked to."""
    why_not = native().why_not
    found = leftovers()
    gone = {one for one in found if arguments.clean and clean(one)}
    if arguments.json:
        print_json(
            {
                "native": {"is_used": not why_not, "why_not": why_not},
                "leftovers": [
                    {"kind": one.kind, "what": one.what, "pid": one.pid, "path": one.path, "is_removed": one in gone}
                    for one in found
                ],
            }
        )
        return _code(found, gone)
    print(f"the native library is {f'not used: {why_not}' if why_not else 'used'}")
    if not found:
        print("nothing is left of runs that have ended")
    for one in found:
        print(f"{'removed: ' if one in gone else ''}{one.what}")
    if found and not arguments.clean:
        print("torchmix doctor --clean removes them")
    return _code(found, gone)


def _code(found: Sequence[Leftover], gone: Set[Leftover]) -> ExitCode:
    return ExitCode.OK if len(gone) == len(found) else ExitCode.FINDINGS
