"""The program `torchmix`, whose imports take half a second, and longer from a cold disk: Ctrl-C may come meanwhile."""

from __future__ import annotations


def start() -> int:
    """Run the command line with the arguments of this process; the exit code."""
    try:
        from torchmix.cli.main import main

        return main()
    except KeyboardInterrupt:  # before `main` can say so itself
        return 130
