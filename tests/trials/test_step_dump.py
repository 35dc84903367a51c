"""The dump of two commits: the same code gives the same digests, and it goes on where it stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.trials import step_dump


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["step_dump", "--seed", "3", *words])
    return step_dump.main()


def test_a_dump_is_repeatable_resumable_and_sees_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    assert run(monkeypatch, "--count", "1", "--out", str(one)) == 0
    assert run(monkeypatch, "--count", "2", "--out", str(one)) == 0
    assert run(monkeypatch, "--count", "2", "--out", str(other), "--same-as", str(one)) == 0
    found = json.loads(other.read_text())
    digests = [digest for recipe in found.values() for part in recipe.values() for digest in part]
    assert len(digests) == len(set(digests)) >= 6 and all(len(digest) == 16 for digest in digests)
    found["3/1"]["train"][2] = "0" * 16
    other.write_text(json.dumps(found))
    assert run(monkeypatch, "--count", "2", "--out", str(other), "--same-as", str(one)) == 1
    assert '"differing": ["3/1"]' in capsys.readouterr().out
