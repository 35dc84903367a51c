"""What verbs take and print: counts, tables for people, JSON for programs, progress, pages of HTML, the exit code."""

from __future__ import annotations

import argparse
import enum
import html
import json
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchmix.catalog.array_files import put_whole
from torchmix.errors import OptionError
from torchmix.recipe.sources import PARTS

# --- Text from files, made safe and short for a terminal.
#
# Cost: about 100 ns a character.

UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of Unicode: controls, formats, surrogates, private and unassigned characters, separators of lines."""
JOINERS = frozenset("\u200c\u200d")
"""Formats that words of some scripts, and many emoji, are written with."""


def readable(text: str, *, keep: str = "") -> str:
    """The text with unsafe characters as escapes, as `\\x1b` or `\\u202e`; those in `keep` stay."""
    return "".join(character if _is_safe(character) or character in keep else _escape(character) for character in text)


def excerpt(text: str, most: int) -> str:
    """The text in one line, as `readable`: whole if it has up to 2 x `most` characters, else its two ends."""
    if len(text) <= 2 * most:
        return readable(text)
    return f"{readable(text[:most])} ... {readable(text[-most:] if most else '')}"


def _is_safe(character: str) -> bool:
    return unicodedata.category(character) not in UNSAFE or character in JOINERS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


# --- What every verb takes and prints: counts, tables for people, JSON for programs, progress, and the exit code.
#
# Progress and messages go to stderr, so that stdout can be piped. Costs nothing beside the work it reports.


class ExitCode(enum.IntEnum):
    """What a command returns to the shell."""

    OK = 0
    FINDINGS = 1
    """The command worked and found something to mend."""
    USAGE = 2
    """Wrong arguments, or a fault in the recipe."""
    DATA = 3
    """Files, columns, catalog: what lies on disk, or runs out."""
    INTERRUPTED = 130
    """Ctrl-C, as shells count it."""


def at_least(lowest: int) -> Callable[[str], int]:
    """A type of argument: whole numbers from `lowest` on."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        return value

    return whole_number


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Declare RECIPE, of a verb that takes one."""
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe in YAML")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare --json, --verbose and --quiet, which every verb takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("--verbose", action="store_true", help="log what is done")
    loudness.add_argument("--quiet", action="store_true", help="no progress, no warnings")


def add_part(parser: argparse.ArgumentParser) -> None:
    """Declare --part."""
    parser.add_argument("--part", choices=PARTS, default=PARTS[0], help=f"part of the recipe (default {PARTS[0]})")


def check_folder(flag: str, path: Path) -> None:
    """Refuse a file to write whose folder is missing: it may be mistyped.

    Raises:
        OptionError: It is missing.
    """
    if not path.parent.is_dir():
        raise OptionError(f"{flag} {path}: there is no folder {path.parent}; make it, or name another file")


def print_json(values: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(values, indent=2, ensure_ascii=False))


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Declare --explain."""
    parser.add_argument("--explain", action="store_true", help="say below each table what its columns mean")


def print_table(columns: Mapping[str, str], rows: Sequence[Sequence[str]], *, explain: bool) -> None:
    """Print rows under a header: the first column flush left, the others flush right.

    Args:
        columns: Name of each column, and what it means.
        rows: Texts, as many in each row as there are columns.
        explain: Print the meanings below the table.
    """
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())
    if explain:
        print_meanings(columns)


def print_meanings(meanings: Mapping[str, str]) -> None:
    """Print what names mean, one below the other, wrapped."""
    width = max(map(len, meanings))
    print()
    for name, meaning in meanings.items():
        indent = " " * (width + 4)
        print(textwrap.fill(meaning, 100, initial_indent=f"  {name.ljust(width)}  ", subsequent_indent=indent))


def count_text(count: int) -> str:
    """12,345,678."""
    return f"{count:,}"


def percent_text(fraction: float) -> str:
    """A fraction with four significant digits, so that a tiny one does not show as 0: 69.97 %, 0.001003 %."""
    return f"{100 * fraction:.4g} %"


def progress_bar(total: int, *, unit: str, title: str, silent: bool, scale: bool = False) -> tqdm[Any]:
    """A bar with rate and time left on stderr; silent where nobody watches (no terminal, `--json` or `--quiet`).

    Args:
        total: Units of the whole work.
        unit: What is counted, as "step" or "B".
        title: What is being done.
        silent: The user wants none.
        scale: Shorten large numbers: 1.2G.
    """
    silent = silent or not sys.stderr.isatty()
    tqdm.monitor_interval = 0  # no watching thread: a command ends when its work does
    return tqdm(total=total, unit=unit, desc=title, disable=silent, unit_scale=scale, leave=False, file=sys.stderr)


# --- The frame of every page of HTML that a verb writes: one style, text escaped, never a half page on disk.

FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 68em; padding: 0 1em; color: #222;
  background: #fff }}
h1 {{ font-size: 1.5em; margin-bottom: .2em }} h2 {{ font-size: 1.15em }} figcaption {{ color: #555; font-size: .9em }}
{style}</style></head><body>
<h1>{title}</h1>
"""


def html_text(title: str, parts: Iterable[str], *, style: str) -> str:
    """The whole page; arguments as `write_html`."""
    return FRAME.format(title=html.escape(title), style=style) + "".join(parts) + "</body></html>\n"


def write_html(path: Path, title: str, parts: Iterable[str], *, style: str) -> None:
    """Write a page beside its place and move it there when it is whole.

    Args:
        path: The file to write.
        title: Text, which is escaped here.
        parts: HTML of the body, in which text is escaped.
        style: CSS that this page has beside that of all.

    Raises:
        OSError: The file cannot be written.
    """
    with put_whole(path, f".{path.name}.partial") as aside, aside.open("w", encoding="utf-8") as file:
        file.write(FRAME.format(title=html.escape(title), style=style))
        file.writelines(parts)
        file.write("</body></html>\n")
