"""`torchmix check` says in which step a change of the shares begins that waits for an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.projects import make_indexed_project
from torchmix.cli.main import main
from torchmix.planner.plans import plan


def test_the_step_of_a_change_at_an_epoch_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_indexed_project(tmp_path)
    change = "{from: {epochs: EPOCHS, of: tiny}, to: 10 steps, set: {web: 10%}}"
    text = recipe.read_text()
    recipe.write_text(f"{text}schedule:\n  - {change.replace('EPOCHS', '1')}\n  - {change.replace('EPOCHS', '900')}\n")
    steps = list(plan(recipe, steps=60))
    tiny = steps[0].streams.index("tiny")
    drawn = [s.pieces.drawn_step[(s.pieces.stream == tiny) & (s.pieces.epoch == 0)].max(initial=0) for s in steps]
    assert main(["check", str(recipe), "--steps", "60"]) == 0
    shown = capsys.readouterr().out
    notes = [line for line in shown.splitlines() if line.startswith("note: schedule[")]
    first, second = notes
    begun = int(first.partition("begins in step ")[2].partition(",")[0])
    assert begun == max(drawn) + 1 and first.endswith("after epoch 1 of tiny")
    assert second.startswith("note: schedule[1]: does not begin in 60 steps: tiny gives")
