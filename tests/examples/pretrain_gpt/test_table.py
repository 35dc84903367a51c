"""The table of the matrix: a check that failed, or was not made, is never a pass."""

from __future__ import annotations

from tests.support.example import PRETRAIN_GPT, example_module

table = example_module("table", PRETRAIN_GPT)


def cell(**problems: list[str]) -> object:
    made = table.Cell(packing="thd", name="PP2 x VPP2")
    for check, lines in problems.items():
        made.note(check, lines)
    return made


def test_a_cell_is_fine_when_all_its_checks_passed() -> None:
    assert cell(plan=[], loss=[]).is_fine
    assert not cell(plan=[], loss=["iteration 1: 6.1 instead of 6.2"]).is_fine


def test_a_cell_without_a_check_is_not_fine() -> None:
    assert not cell().is_fine


def test_a_line_says_of_each_check_what_came_of_it() -> None:
    text = table.table([cell(plan=[], loss=["6.1"])], table.LAYOUT_CHECKS)
    title, line = text.splitlines()
    assert title.split() == ["packing", "name", "plan", "loss", "resume", "resumed", "loss", "seconds"]
    assert line.split() == ["thd", "PP2", "x", "VPP2", "pass", "FAIL", "-", "-", "-"]


def test_the_verdict_names_the_checks_that_failed() -> None:
    assert cell(plan=[], loss=[]).verdict == "thd PP2 x VPP2: pass"
    assert cell(plan=["a"], loss=[], resume=["b"]).verdict == "thd PP2 x VPP2: FAIL (plan, resume)"


def test_what_failed_is_told_below() -> None:
    assert table.failures([cell(plan=[])]) == ""
    told = table.failures([cell(plan=[], loss=["iteration 1: 6.1", "iteration 2: no loss"])])
    assert told == "\nthd PP2 x VPP2, loss:\n  iteration 1: 6.1\n  iteration 2: no loss\n"
