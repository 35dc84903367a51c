"""The trial of many clients at a small count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.many_clients import run

pytestmark = pytest.mark.system


def test_loaders_give_every_client_its_documents_and_keep_nothing_of_those_that_are_gone(tmp_path: Path) -> None:
    note = run(tmp_path, 1, clients=12, steps=120, waves=2, processes=2)
    assert note["steps"] == 120 and note["clients"] == 12
    assert all(len(one["descriptors"]) == 2 for one in note["waves"])
