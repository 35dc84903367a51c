"""docs/maps.md as its reader follows it: the function, the recipe, the commands, and then the tokens of a loader."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.files import make_text_file
from tests.support.processes import ROOT
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

PAGE = (ROOT / "docs" / "maps.md").read_text(encoding="utf-8")


def test_the_page_is_followed_from_the_function_to_the_first_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_text_file(
        tmp_path / "code.parquet", ["# MIT\n# 1999\nx = 1\n# kept\n", "y = 2\n", None, ""] * 40, column="content"
    )
    commands: list[str] = []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if language == "python":
            Path("clean.py").write_text(block, encoding="utf-8")
        elif language == "yaml":
            Path("recipe.yaml").write_text(block, encoding="utf-8")
        elif language == "console":
            commands += [line.removeprefix("$ torchmix ") for line in block.splitlines()]
    try:
        for command in commands:
            assert main(command.split()) == 0, capsys.readouterr()
        with build_loader("recipe.yaml", topology=Topology(), loaders="in_process") as loader:
            microbatch = next(iter(loader))
            tokens = bytes(token for token in microbatch.tokens.flatten().tolist() if token < 256)
    finally:
        sys.modules.pop("clean", None)
    assert len(commands) == 2
    assert b"x = 1\n# kept\n" in tokens and b"MIT" not in tokens and b"y = 2\n" in tokens
