"""The tables beside the paper's figures, at a small size: what does not depend on a clock."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import ROOT


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import paper_figures

    monkeypatch.setattr(paper_figures, "state_of_a_source", lambda recipe: 5 << 20)
    monkeypatch.setattr(paper_figures, "STEPS", 4)
    return paper_figures


def test_four_tables_with_as_many_rows_as_sizes(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paper_figures.py", "--sources", "2", "--nodes", "64"])
    module.main()
    tables = [table.splitlines() for table in capsys.readouterr().out.strip().split("\n\n")]
    assert [len(table) for table in tables] == [2, 2, 4, 2]
    memory = [int(line.split("|")[-2].replace(",", "")) for line in tables[2][1:]]
    assert memory[0] == 16 * (64 + 306 * 5) and memory[1] == 64 + 306 * 5 > memory[2]
