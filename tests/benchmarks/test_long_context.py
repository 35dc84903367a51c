"""The benchmark of runs of ranks runs, and its tables are whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "long_context.py"


def test_its_tables_are_whole_and_the_bound_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("long_context_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert 1 <= module.run([16], [2, 4], 0, 1) <= 1.06
    lines = [line for line in capsys.readouterr().out.splitlines() if " | " in line]
    assert len([line for line in lines if line.startswith(module.KINDS)]) == 12
    for line in lines:
        if line.startswith("tail | 16 | ") and " x | " in line:
            cells = line.split(" | ")
            assert float(cells[4]) <= float(cells[5].split()[0]) + 1e-3 <= float(cells[7]) + 2e-3
