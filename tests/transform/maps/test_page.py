"""docs/maps.md as its reader follows it: the function, the recipe, the commands, and then the tokens of a loader."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.files import make_text_file
from tests.support.processes import ROOT
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader
from torchmix.transform.maps import open_map

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
            name = re.findall(r"^# (\w+\.py)", block)[0]
            Path(name).write_text(block, encoding="utf-8")
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
        of_chats = open_map("talks:without_system", tmp_path, "map").function
    finally:
        for name in ("clean", "talks"):
            sys.modules.pop(name, None)
    chat = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hi"}]
    made = of_chats({"messages": pa.array([json.dumps(chat)])}, row=None, epoch=0, seed=None)["text"]
    assert json.loads(made[0].as_py()) == chat[1:]
    assert len(commands) == 2
    assert b"x = 1\n# kept\n" in tokens and b"MIT" not in tokens and b"y = 2\n" in tokens
