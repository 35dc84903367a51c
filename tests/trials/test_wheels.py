"""The trial of wheels: its commands are ones, its list of modules without torch holds, and a source distribution builds
the library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from tests.trials import wheels
from torchmix.cli.main import command_parser


def test_its_commands_are_parsed() -> None:
    commands = wheels.commands_of(Path("torchmix"))
    assert len(commands) > 8
    for words in commands.values():
        if not words[-1].startswith("--"):  # help and version end the parser
            command_parser().parse_args(words[1:])


def test_what_runs_before_training_is_imported_without_torch() -> None:
    hidden = "import sys; sys.modules['torch'] = sys.modules['torchdata'] = None\n"
    script = hidden + wheels.scripts_of(with_torch=False)["imports"]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200


@pytest.mark.system
@pytest.mark.examples
def test_a_source_distribution_builds_the_library(tmp_path: Path) -> None:
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed")
    found = wheels.run_compilers(["gcc"], tmp_path / "found.json", kinds=["sdist"])
    assert found["gcc sdist"]["failed"] == {}  # type: ignore[index]
    assert found["gcc sdist"]["calls"]  # type: ignore[index]
