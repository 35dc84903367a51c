"""docs/megatron.md against the adapter: every flag it has or refuses is on the page, and no other."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from torchmix.megatron_adapter import extra_args
from torchmix.megatron_adapter.flags import refused_flags

PAGE = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text(encoding="utf-8")


def flags_in(title: str) -> set[str]:
    """Flags in the first column of the first table under a heading."""
    section = PAGE[PAGE.index(f"## {title}\n") :]
    table = re.search(r"((?:^\|.*\|\n)+)", section, re.MULTILINE)
    assert table is not None
    return {flag for row in table[1].splitlines() for flag in re.findall(r"`(--[\w-]+)", row.split(" | ")[0])}


def test_the_flags_of_the_page_are_those_of_the_parser() -> None:
    parser = extra_args()(argparse.ArgumentParser(add_help=False))
    assert flags_in("Flags") == {flag for action in parser._actions for flag in action.option_strings}


def test_every_refused_flag_is_on_the_page() -> None:
    assert set(refused_flags()) <= flags_in("Refused")
