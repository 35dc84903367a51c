"""The trial of chat templates against transformers, at a small count."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import TEMPLATES
from tests.trials.chat_templates import NOT_INSTALLED, run


def test_ids_and_masks_are_those_of_transformers() -> None:
    found = run(seed=1, count=20)
    if found.get("said") == NOT_INSTALLED:
        pytest.skip(NOT_INSTALLED)
    assert [found[kind] for kind in TEMPLATES] == [{"compared": 20, "ids differ": 0, "masks differ": 0}] * len(
        TEMPLATES
    )
