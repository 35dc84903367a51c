"""A trial continues where it was stopped, and names the one that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.trial import continued, trial_parser, whole, write_whole


def test_what_was_found_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tried = tmp_path / "found.json", list[int]()

    def try_one(seed: int, number: int) -> dict[str, int]:
        tried.append(number)
        if number == 2 and tried.count(2) == 1:
            raise AssertionError("the second")
        return {"sum": seed + number}

    asked = trial_parser("about", count=4).parse_args(["--seed", "7", "--out", str(out)])
    with pytest.raises(AssertionError):
        continued(asked, try_one)
    assert "7/2 has failed" in capsys.readouterr().err
    assert list(json.loads(out.read_text())) == ["7/0", "7/1"]
    found = continued(asked, try_one)
    assert tried == [0, 1, 2, 2, 3] and found == json.loads(out.read_text())
    assert [one["sum"] for one in found.values()] == [7, 8, 9, 10]
    continued(asked, try_one, again=lambda one: one["sum"] == 9)
    continued(asked, try_one, label=" wide", most=1)
    assert tried == [0, 1, 2, 2, 3, 2, 0] and "7/0 wide" in json.loads(out.read_text())


def test_a_trial_that_is_one_run_writes_what_it_found(tmp_path: Path) -> None:
    asked = trial_parser("about", count=3, out=str(tmp_path / "x.json")).parse_args([])
    assert whole(asked, lambda seed, count: {"all": seed + count}) == {"seed": 1, "count": 3, "all": 4}
    assert json.loads((tmp_path / "x.json").read_text())["all"] == 4


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    write_whole(out, {"a": 1})
    with pytest.raises(TypeError):
        write_whole(out, {"a": 2, "b": object()})
    assert json.loads(out.read_text()) == {"a": 1}
    out.chmod(0o400)  # replaced, not written into
    write_whole(out, {"a": 3})
    assert json.loads(out.read_text()) == {"a": 3} and [path.name for path in tmp_path.iterdir()] == ["found.json"]
