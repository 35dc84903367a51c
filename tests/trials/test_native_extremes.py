"""The native fold under sanitizers: a few calls of the trial."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.native import native_or_not
from tests.trials.native_extremes import sanitized, steps_without_growth


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the sanitizers are gcc's")
def test_forged_calls_are_refused_and_touch_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setenv("CFLAGS", "-O0")  # the compiler takes most of the time
    ended = sanitized(tmp_path, "forged", 7, 30)
    assert sum(ended.values()) == 30
    assert any("out of bounds" in words for words in ended)


def test_many_steps_take_no_more_memory() -> None:
    with native_or_not(True):
        assert len(steps_without_growth(2000)) > 1
