"""Verbs that look at a recipe leave its catalog as it is, also where the recipe was edited since a run had it."""

from __future__ import annotations

from pathlib import Path

from tests.support.loaders import run_job, write_job
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology
from torchmix.stateful.stream import state_bytes


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_looking_at_an_edited_recipe_writes_nothing(tmp_path: Path) -> None:
    recipe = write_job(tmp_path)
    old, state = tmp_path / "old.yaml", tmp_path / "state"
    old.write_text(recipe.read_text())
    state.write_bytes(state_bytes(run_job(recipe, Topology(), steps=3, keep=False)[0].state))
    before = contents(tmp_path / "catalog")
    assert any(name.endswith(".run.json") for name in before), "the run has a history"
    recipe.write_text(
        recipe.read_text().replace("{web: 60%, prose: 38%, tiny: 2%}", "{web: 50%, prose: 48%, tiny: 2%}")
    )
    for words in (
        ["plan", str(recipe), "--steps", "5", "--quiet"],
        ["check", str(recipe), "--steps", "5"],
        ["show", str(recipe), "--step", "2"],
        ["diff", str(old), str(recipe), "--state", str(state), "--steps", "5"],
        ["plan", str(recipe), "--steps", "5", "--quiet"],
    ):
        assert main(words) in (0, 1), words
    assert contents(tmp_path / "catalog") == before
