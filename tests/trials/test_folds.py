"""Random recipes, folded by the native library and by the reference: a few of the trial, and that it can fail."""

from __future__ import annotations

import pytest

from tests.support.native import built_library
from tests.trials.folds import try_recipe
from torchmix.planner import folding


@pytest.fixture(autouse=True)
def native_library() -> None:
    built_library()


@pytest.mark.parametrize("number", range(12))
def test_a_native_fold_is_that_of_the_reference(number: int) -> None:
    found = try_recipe(5, number, steps=25)
    assert found.get("refused") or found["calls"] > 0


def test_a_fold_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "named_key", lambda *_: 5)
    with pytest.raises(AssertionError, match="step"):
        try_recipe(5, 3, steps=9)
