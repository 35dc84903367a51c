"""Every command of torchmix that a page or an example shows, against the parser: verbs, options and their values."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.support.processes import ROOT
from torchmix.cli.main import command_parser, main

FILES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*"))
    if path.suffix in (".md", ".yaml", ".sbatch", ".py", ".sh") and path.name != "CHANGELOG.md"
)
PARSER = command_parser()
STAND_INS = {"A:B": "0:2", "I/N": "1/2", "COPY=WORLD": "1", "STEP,...": "1", "[NAME=]VALUE": "1"}
"""What pages write where a reader puts a value of their own; single letters are numbers."""


def commands_of(text: str) -> list[tuple[str, bool]]:
    """Commands, and whether each is whole: a line of a block, and not an expression in a sentence."""
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^(?: {4,}|#[ ]*|\$ |    \$ )?(torchmix [a-z]+ [^\n]*)$", text, re.MULTILINE)
    prose = re.compile(r"\.$|: | (is|are|has|says|takes|and|the) ")
    whole = [line for line in lines if not prose.search(line.split(" #")[0].strip()) and "`" not in line]
    return [(line, True) for line in whole] + [
        (" ".join(span.split()), False) for span in re.findall(r"`(torchmix [a-z]+\s[^`]+)`", text)
    ]


def words_of(command: str) -> list[str]:
    words = shlex.split(command, comments=True)[1:]
    for end in (">", "2>", "|", "&&", ";", "&"):
        words = words[: words.index(end)] if end in words else words
    words = [STAND_INS.get(word, "1" if re.fullmatch(r"[A-Z]|\$\w+", word) else word) for word in words]
    return [word for word in words if word not in ("...", "…")]


def test_every_command_is_one_that_the_parser_takes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [(path, *found) for path in FILES for found in commands_of(path.read_text(encoding="utf-8"))]
    assert len(shown) > 80
    faults = []
    for path, command, is_whole in shown:
        said = usage_error(words_of(command), capsys)
        if said and (is_whole or not re.search("are required|expected", said)):
            faults.append(f"{path.relative_to(ROOT)}: {command}: {said}")
    assert not faults, "\n".join(faults)


def usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the parser says against the words, or nothing."""
    try:
        PARSER.parse_args(words)
    except SystemExit as done:
        said = capsys.readouterr().err.strip().splitlines()
        return said[-1] if done.code else ""
    return ""


def test_a_command_with_an_option_that_is_none_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Say `torchmix plan R --stepz 3`, or:\n\n    torchmix keys recipe.yaml ./keys   # make them\n"
    found = commands_of(text)
    assert found == [("torchmix keys recipe.yaml ./keys   # make them", True), ("torchmix plan R --stepz 3", False)]
    assert all("unrecognized" in usage_error(words_of(command), capsys) for command, _ in found)
    assert main(["server"]) == 2 and "did you mean 'serve'" in capsys.readouterr().err


def test_no_text_installs_a_project_of_an_index_that_has_this_name() -> None:
    """`torchmix` is somebody else's there, and `torchmix-data` could be anybody's until it is released."""
    tool = r"(?:pip3?|uv|uv pip|pipx|conda|mamba|poetry)\s+(?:install|add|run)|uvx"
    command = re.compile(rf"(?:{tool})\s[^`\n]*?(?<![\w/.])torchmix(?:[-_]data)?(?![\w/.]|[^`\n]*\.whl)")
    wrong = ("pip install 'torchmix[images]'", "$ pip install -U torchmix", "uv add torchmix-data", "uvx torchmix")
    right = ("pip install .", "pip install dist/torchmix_data-0.1.0-py3-none-any.whl", "pip install ./torchmix")
    assert [bool(command.search(text)) for text in (*wrong, *right)] == [True] * 4 + [False] * 3
    folders = ("docs", "examples", "benchmarks", "torchmix", ".github", ".ci")
    files = {*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))}
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in files
        if path.is_file() and path.suffix not in (".png", ".so", ".pyc")
    }
    assert len(texts) > 400 and ROOT / "Makefile" in texts and ROOT / ".ci" / "run" in texts
    assert [path for path, text in texts.items() if command.search(text)] == []
