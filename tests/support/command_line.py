"""The command line of torchmix as a program of the tests: `python -m tests.support.command_line WORD...`.

In: words, see `torchmix --help`. Out: what the command prints and its exit code; see `fork_server.py` for its end.
"""

import sys

from torchmix.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
