"""The check that some run executes every test, on files of junit as pytest writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.executed import main, skipped_everywhere


def junit(path: Path, **cases: str | None) -> Path:
    """A file with a test for each keyword, `__` for a dot: None where it ran, else the reason why not."""
    found = []
    for case, reason in cases.items():
        module, _, name = case.replace("__", ".").rpartition(".")
        skipped = "" if reason is None else f'<skipped type="pytest.skip" message="{reason}">x.py:1: {reason}</skipped>'
        found.append(f'<testcase classname="{module}" name="{name}">{skipped}</testcase>')
    path.write_text(f"<testsuites><testsuite>{''.join(found)}</testsuite></testsuites>", encoding="utf-8")
    return path


def test_a_test_that_one_run_executes_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = junit(tmp_path / "1.xml", m__a=None, m__b="b is not installed", m__c="c is not installed")
    second = junit(tmp_path / "2.xml", m__b=None)
    assert skipped_everywhere([first, second]) == {"m::c": "c is not installed"}
    assert main([str(first), str(second)]) == 1
    assert "no run executes m::c: c is not installed" in capsys.readouterr().out
    third = junit(tmp_path / "3.xml", m__c=None)
    assert main([str(first), str(second), str(third)]) == 0


def test_a_module_that_is_skipped_whole_is_executed_by_any_test_of_it(tmp_path: Path) -> None:
    first = tmp_path / "1.xml"
    first.write_text(
        '<testsuites><testsuite><testcase classname="" name="tests.a"><skipped message="collection skipped">'
        "('a.py', 2, 'Skipped: nono is not installed')</skipped></testcase></testsuite></testsuites>",
        encoding="utf-8",
    )
    [(name, reason)] = skipped_everywhere([first]).items()
    assert name == "tests.a" and "nono is not installed" in reason
    assert skipped_everywhere([first, junit(tmp_path / "2.xml", tests__a__test_x=None)]) == {}


def test_what_the_machine_lacks_is_no_failure_and_an_expected_failure_is_executed(tmp_path: Path) -> None:
    run = junit(tmp_path / "1.xml", m__a="no /proc here", m__b="hosts on one machine cannot be made here: ip")
    assert main([str(run)]) == 0
    run.write_text(
        '<testsuites><testsuite><testcase classname="m" name="a"><skipped type="pytest.xfail" message=""/></testcase>'
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    assert skipped_everywhere([run]) == {}
    assert main([]) == 2
