"""The example's model and checkpoints with the real megatron-core, in processes of their own: it changes torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.example import EXAMPLE
from tests.support.forks import MEGATRON
from tests.support.processes import Processes

pytestmark = pytest.mark.system

DEADLINE_S = 180.0
RECIPE = str(EXAMPLE / "recipe.yaml")


def lines_of(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    """Run a program and parse its JSON lines."""
    with Processes(tmp_path) as processes:
        child = processes.fork_python("-m", *arguments, after=MEGATRON)
        assert child.wait(deadline_s=DEADLINE_S) == 0, child.report()
        return [json.loads(line) for line in child.stdout().splitlines() if line.startswith("{")]


def test_editing_one_document_leaves_the_logits_of_the_others_bit_equal(tmp_path: Path) -> None:
    (counts,) = lines_of(tmp_path, "tests.support.megatron_logits", RECIPE)
    assert counts["outside"] == 0
    assert counts["inside"] == counts["logits"], "the edit must reach every logit of its own document"


def test_a_kill_at_any_moment_of_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    lines = lines_of(tmp_path, "tests.support.checkpoint_kills", RECIPE, str(folder))
    loaded, ended = lines[::2], lines[1::2]
    codes = {str(line["killed"]): line["code"] for line in ended[1:-1]}
    assert set(codes.values()) == {-9}, codes
    # The first process starts afresh; those killed before `latest` moves leave step 1; the last one, step 2.
    assert [line["loaded"] for line in loaded] == [0, 1, 1, 1, 1, 2]
    assert "step_00000003" in ended[-1]["left"]  # type: ignore[operator]
    assert not [name for name in ended[-1]["left"] if name.endswith(".writing")]  # type: ignore[attr-defined]
