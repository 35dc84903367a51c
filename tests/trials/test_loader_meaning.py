"""The trial of meaning at a small count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.loader_meaning import pings_of_zmtp, pings_unread, run

pytestmark = pytest.mark.system


def test_a_loader_under_floods_goes_on(tmp_path: Path) -> None:
    note = run(tmp_path, 3, 0, flood_mib=16, out=tmp_path / "note.json", floods=(pings_of_zmtp, pings_unread))
    for name, flood in note["floods"].items():
        assert flood["by_signal"] == [] and flood["honest_answers"] > 0, name
        assert "honest_client_failed" not in flood, name
