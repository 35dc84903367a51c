"""Tables of the pages stand alone, so that Markdown renders them as tables and the text around them as text.

A table begins and ends with an empty line, has a ruler below its head, and as many cells in each row. The same holds
for lists and headings behind a paragraph, which Python-Markdown takes for its continuation otherwise.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_docs import PAGES, page_name
from tests.support.processes import ROOT

RULER = re.compile(r"\|(?:\s*:?-{3,}:?\s*\|)+")
CELLS = re.compile(r"(?<!\\)\|")
ITEM = re.compile(r"(?:[-*+]|\d+\.) ")


def faults_of(text: str) -> list[str]:
    """What would not render in the lines of a page that are outside of blocks of code."""
    lines, faults, is_code = ["", *text.splitlines(), ""], [], False
    for number, line in enumerate(lines[1:-1], 1):
        before, after = lines[number - 1], lines[number + 1]
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code or line.startswith("    "):
            continue
        if line.startswith("|"):
            if not before.startswith("|"):
                if before.strip():
                    faults.append(f"line {number}: no empty line before a table")
                if not RULER.fullmatch(after.strip()):
                    faults.append(f"line {number}: no ruler below the head of a table")
            elif len(CELLS.findall(line)) != len(CELLS.findall(before)):
                faults.append(f"line {number}: another number of cells than the row above it")
            if not after.startswith("|") and after.strip():
                faults.append(f"line {number}: no empty line behind a table")
        elif ITEM.match(line) and before.strip() and not before.startswith((" ", "#")) and not ITEM.match(before):
            faults.append(f"line {number}: no empty line before a list")
    return faults


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_tables_and_lists_stand_alone(page: Path) -> None:
    faults = faults_of(page.read_text(encoding="utf-8"))
    assert not faults, f"{page_name(page)}: {faults}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("| a | b |\n|---|---|\n| 1 | 2 |\n", None),
        ("| a | b |\n|---|---|\n| 1 | `\\|` |\n\nafter", None),
        ("text\n\n- an item\n  that goes on\n- another\n\n    | code |\nnothing", None),
        ("```text\n| code |\nmore\n```\n", None),
        ("before\n| a | b |\n|---|---|\n| 1 | 2 |", "line 2: no empty line before a table"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\nafter", "line 3: no empty line behind a table"),
        ("| a | b |\n| 1 | 2 |", "line 1: no ruler below the head of a table"),
        ("| a | b |\n|---|---|\n| 1 |", "line 3: another number of cells than the row above it"),
        ("text\n1. an item", "line 2: no empty line before a list"),
    ],
)
def test_what_does_not_render_is_found(text: str, fault: str | None) -> None:
    assert faults_of(text) == ([] if fault is None else [fault])


def test_the_pages_have_tables() -> None:
    tables = sum(text.count("\n|---") for text in (page.read_text(encoding="utf-8") for page in PAGES))
    assert tables > 80 and any(page == ROOT / "README.md" for page in PAGES)
