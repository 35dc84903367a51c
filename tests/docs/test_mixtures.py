"""docs/mixtures.md from top to bottom, as its reader follows it: what it shows is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import ROOT
from torchmix.cli.main import main

PAGE = (ROOT / "docs" / "mixtures.md").read_text(encoding="utf-8")


def squeezed(text: str) -> list[str]:
    """Lines with single spaces, blank ones left out."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe: dict[str, Any] = {}
    printed: list[str] = []
    same: list[list[str]] = []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(block, {})
        elif language == "yaml":
            recipe |= yaml.safe_load(block)  # a block replaces the keys that it has
            Path("recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
            printed = []
            if block.startswith("mixture: {web: 6,"):  # ratios: "the same steps"
                main(["plan", "recipe.yaml", "--steps", "50"])
                printed = squeezed(capsys.readouterr().out)
                missing = [line for line in same[0] if line not in printed]
                assert not missing, printed
        elif language == "console":
            capsys.readouterr()
            for line in block.splitlines():
                assert main(shlex.split(line.removeprefix("$ torchmix "))) == 0, line
            printed = squeezed(capsys.readouterr().out)
        else:
            assert language == "text"
            same.append(squeezed(block))
            missing = [line for line in same[-1] if line not in printed]
            assert not missing, printed
    assert len(same) == 8


def test_shares_that_miss_something_are_the_error_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = re.search(r"^```yaml\n(version.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert whole is not None and "code: 20%}" in whole[1]
    (tmp_path / "recipe.yaml").write_text(whole[1].replace("code: 20%}", "code: 10%}"), encoding="utf-8")
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 2
    said = "recipe.yaml: line 9: mixture: the shares sum to 90%, not 100%; 10% is missing"
    assert said in capsys.readouterr().err and said in PAGE


def test_a_path_that_a_schedule_does_not_have_is_the_error_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe: dict[str, Any] = {}
    for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        recipe |= yaml.safe_load(block)
        if recipe.get("schedule"):  # what comes after it is of another section
            break
    recipe["schedule"][1]["set"] = {"text.rst": "50%"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 2
    said = "schedule[1].set: the mixture has no 'text.rst' (did you mean 'text.rest'?)"
    assert said in capsys.readouterr().err and said in PAGE
