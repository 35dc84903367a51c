"""The dump of two commits: the same code gives the same values, a dump goes on, and the first difference is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.native import native_or_not
from tests.trials import step_dump


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["step_dump", "--seed", "3", *words])
    return step_dump.main()


def test_a_dump_goes_on_is_that_of_the_reference_and_by_turns_and_names_the_first_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert run(monkeypatch, "--count", "1", "--out", one) == 0
    made = {path.name: path.stat().st_mtime_ns for path in Path(one).iterdir()}
    assert run(monkeypatch, "--count", "2", "--out", one) == 0
    assert {path.name: path.stat().st_mtime_ns for path in Path(one).iterdir()}.items() >= made.items()
    monkeypatch.setattr(step_dump, "WAYS", {})
    capsys.readouterr()
    with native_or_not(True):
        for way, out in (("0", str(tmp_path / "without")), ("turns", other)):
            assert run(monkeypatch, "--count", "2", "--native", way, "--out", out, "--same-as", one) == 0
            assert json.loads(capsys.readouterr().out) == {"compared": 2, "differing": []}
    path = Path(other) / "3-1.json"
    found = json.loads(path.read_text())
    found["first"]["state"] = "0" * 16
    path.write_text(json.dumps(found))
    assert run(monkeypatch, "--count", "2", "--out", other, "--same-as", f"{one}/3-1.json", "--but", "state") == 0
    assert run(monkeypatch, "--count", "2", "--out", other, "--same-as", one) == 1
    tensors = found["first"]["tensors"]["rank 0"]["step 0 microbatch 0"]
    tensors["labels"] = "f" * 16
    path.write_text(json.dumps(found))
    capsys.readouterr()
    assert run(monkeypatch, "--count", "2", "--out", other, "--same-as", one) == 1
    [named] = json.loads(capsys.readouterr().out)["differing"]
    assert named.startswith('3-1.json: first: tensors: rank 0: step 0 microbatch 0: labels: "ffff')


def test_no_recipe_is_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "3-0.json").write_text("{}")
    (tmp_path / "other").mkdir()
    words = ("--count", "1", "--out", str(tmp_path / "one"), "--same-as")
    assert run(monkeypatch, *words, str(tmp_path / "other")) == 1
    assert run(monkeypatch, *words, str(tmp_path / "one" / "3-7.json")) == 1
