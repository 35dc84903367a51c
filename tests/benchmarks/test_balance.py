"""The benchmark of balance runs, and its direct placement is that of the graph."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; it imports a neighbour."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("balance_benchmark", FOLDER / "balance.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "planning")
    return module


def test_the_graph_of_a_recipe_gives_the_plans_of_a_direct_placement(benchmark: ModuleType) -> None:
    one, other = (benchmark.make_planner(64, 8, 4, "best_fit", 4_000) for _ in range(2))
    cursor, same = one.start(), other.start()
    for _ in range(5):
        plan, cursor = one.step(cursor)
        direct, same = benchmark.placed_directly(other, same)
        assert direct.plan_digest == plan.plan_digest and direct.balance == plan.balance
        assert cursor.order_digest == same.order_digest


@pytest.mark.slow
def test_its_tables_are_whole(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.methods_table((64,), 1)
    benchmark.samples_table((64,))
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith(("items", "length"))]
    assert [line.count("|") for line in lines if "|" in line] == [9] * 7 + [4] * 4 and len(heads) == 2
