"""The trial of size rules against transformers, at a small count."""

from __future__ import annotations

import pytest

from tests.trials.image_processors import NOT_INSTALLED, run


def test_sizes_are_those_of_transformers() -> None:
    found = run(seed=1, count=400)
    if found.get("said") == NOT_INSTALLED:
        pytest.skip(NOT_INSTALLED)
    assert [found[rule] for rule in ("Qwen2-VL", "Qwen3-VL", "InternVL", "LLaVA-NeXT")] == [0] * 4
