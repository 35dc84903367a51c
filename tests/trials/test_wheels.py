"""The trial of wheels: its commands are ones, and its list of modules without torch holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.deadlines import LONG_S
from tests.trials import wheels
from torchmix.cli.main import _parser


def test_its_commands_are_parsed() -> None:
    commands = wheels.commands_of(Path("torchmix"))
    assert len(commands) > 8
    for words in commands.values():
        if not words[-1].startswith("--"):  # help and version end the parser
            _parser().parse_args(words[1:])


def test_what_runs_before_training_is_imported_without_torch() -> None:
    hidden = "import sys; sys.modules['torch'] = sys.modules['torchdata'] = None\n"
    script = hidden + wheels.scripts_of(with_torch=False)["imports"]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200
