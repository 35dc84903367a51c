"""docs/tutorial.md: its commands and scripts, from top to bottom, in the folder of a reader with two small sources."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.processes import ROOT, Processes

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.mark.system
def test_the_tutorial_works_from_top_to_bottom(tmp_path: Path) -> None:
    make_text_file(tmp_path / "corpus" / "peps.parquet", random_texts(1, 400))
    for number in range(2):
        make_tokens_file(tmp_path / "data" / f"web-{number}.parquet", random_tokens(2 + number, 900, mean_tokens=120))
    digests: list[str] = []
    steps = re.findall(r"^```(console|yaml|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [language for language, _ in steps].count("python") == 2
    with Processes(tmp_path) as processes:
        for number, (language, block) in enumerate(steps):
            if language == "yaml":
                recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text(encoding="utf-8")) | yaml.safe_load(block)
                (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
                continue
            scripts = [block]
            if language == "console":
                lines = [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]
                assert all(line[0] == "torchmix" for line in lines)
                scripts = [
                    f"import sys; from torchmix.cli.main import main; sys.exit(main({line[1:]!r}))" for line in lines
                ]
            for part, script in enumerate(scripts):
                child = processes.fork_python(
                    "-c", f"import os; os.chdir({str(tmp_path)!r})\n{script}", name=f"step-{number}-{part}"
                )
                assert child.wait(deadline_s=120) in ((0, 1) if "'check'" in script else (0,)), child.report()
                digests += re.findall(r"\b[0-9a-f]{16}\b", child.stdout()) if language == "python" else []
                last = child.stdout()
    assert len(digests) == 5, "three steps, then two"
    assert f"digest    {digests[-1]} after step 4" in last, "the plan of five steps has the digest of training"
