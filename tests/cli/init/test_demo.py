"""`torchmix init --demo`: corpus and recipe work as they come, and nothing is overwritten."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from torchmix.cli.main import main
from torchmix.recipe.load import load_recipe


@pytest.fixture(autouse=True)
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(40):
        (library / f"m{number}.py").write_text(f'"""Module {number}."""\n\ndef f():\n    """Do {number}."""\n' * 9)
    (library / "broken.py").write_text("def (")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    monkeypatch.chdir(tmp_path)
    return library


def test_the_demonstration_indexes_plans_and_shows(capsys: Any) -> None:
    assert main(["init", "--demo"]) == 0
    recipe = Path("torchmix-demo", "recipe.yaml")
    assert sorted(load_recipe(recipe).sources) == ["code", "docs"]
    assert main(["index", str(recipe)]) == 0
    assert main(["plan", str(recipe), "--steps", "2"]) == 0
    assert main(["show", str(recipe), "--source", "docs", "--rows", "0:2"]) == 0
    assert "Module 0." in capsys.readouterr().out


def test_what_is_in_the_folder_stays(capsys: Any) -> None:
    folder = Path("mine")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert main(["init", "--demo", "mine"]) == 0
    (folder / "recipe.yaml").write_text("changed")
    assert main(["init", "--demo", "mine"]) == 2
    assert "mine/recipe.yaml exists" in capsys.readouterr().err
    assert (folder / "recipe.yaml").read_text() == "changed" and (folder / "notes.txt").read_text() == "mine"
    assert main(["init", "--demo", "mine", "--force"]) == 0
    assert (folder / "recipe.yaml").read_text() != "changed"
    (folder / "recipe.yaml").unlink()
    assert main(["init", "--demo", "mine"]) == 2, "its data is there"
