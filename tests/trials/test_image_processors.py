"""The trial of size rules against transformers, at a small count."""

from __future__ import annotations

import pytest

from tests.support.model_folders import PICTURE_MODELS
from tests.trials.image_processors import NOT_INSTALLED, run


def test_sizes_are_those_of_transformers() -> None:
    found = run(seed=1, count=400)
    if found.get("said") == NOT_INSTALLED:
        pytest.skip(NOT_INSTALLED)
    rules = ("Qwen2-VL", "Qwen3-VL", "InternVL", "LLaVA-NeXT", "LLaVA-OneVision")
    assert [found[rule] for rule in rules] == [0] * len(rules)
    assert set(found["values"]) == set(PICTURE_MODELS)
    assert all(one["values"] > 1000 and one["different"] == 0 for one in found["values"].values())
