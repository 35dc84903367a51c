"""The command line of torchmix in tests: here, or as a program, `python -m tests.support.command_line WORD...`.

In: words, see `torchmix --help`. Out: what the command prints and its exit code; see `fork_server.py` for its end.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from torchmix.cli.main import main

if TYPE_CHECKING:
    import pytest


def values_of(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    """What a command prints as JSON; nothing that was printed before."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


if __name__ == "__main__":
    sys.exit(main())
