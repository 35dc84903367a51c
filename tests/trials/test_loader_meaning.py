"""The trial of meaning at a small count, stopped and gone on with once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.loader_meaning import endless_message, pages_ahead, pings_of_zmtp, run

pytestmark = pytest.mark.system


def test_a_loader_goes_on_under_lies_and_floods(tmp_path: Path) -> None:
    floods, out = (pings_of_zmtp, pages_ahead, endless_message), tmp_path / "note.json"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    assert run(tmp_path / "first", 3, 60, flood_mib=48, out=out, floods=())["done"] == 60
    note = run(tmp_path / "second", 3, 200, flood_mib=48, out=out, floods=floods)
    assert note["done"] == 200 and note["counts"]["answered: PieceReply"] > 0
    for name, found in {"lies": note["lies"], **note["floods"]}.items():
        assert found["honest_answers"] > 0 and found["loader_ended"] == 0, name
        assert "honest_client_failed" not in found and not found.get("by_signal"), name
