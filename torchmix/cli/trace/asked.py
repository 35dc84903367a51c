"""The documents that a command names: rows, ids, or a file with a list of both.

In: words of the command line. Out: rows of sources. Must hold: a word that names nothing is an error. Cost: a look at
the kept ids, where ids are given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchmix.errors import OptionError
from torchmix.lineage.documents import DocumentNames


def add_documents(parser: argparse.ArgumentParser) -> None:
    """Declare --row, --id and --list."""
    group = parser.add_argument_group("which documents; may be given together")
    group.add_argument("--row", action="append", default=[], metavar="SOURCE:R", help="a row, as web:1234; again")
    group.add_argument("--id", action="append", default=[], metavar="ID", help="what the id column names; again")
    group.add_argument("--list", type=Path, metavar="FILE", help="a text file with a row or an id in each line")


def has_documents(arguments: argparse.Namespace) -> bool:
    """Whether documents are named."""
    return bool(arguments.row or arguments.id or arguments.list is not None)


def documents_asked(
    arguments: argparse.Namespace, names: DocumentNames, sources: Sequence[str]
) -> list[tuple[str, int]]:
    """Source and row of each.

    Raises:
        OptionError: A word names no document, or the file cannot be read.
    """
    words, ids = list(arguments.row), list(arguments.id)
    if arguments.list is not None:
        for line in _lines(arguments.list):
            name, _, number = line.rpartition(":")
            (words if name in sources and number.isdigit() else ids).append(line)
    rows = [names.row(word) for word in words]
    return rows + (names.rows_of_ids(ids) if ids else [])


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--list {path}: {getattr(error, 'strerror', error)}") from error
    found = [line for line in lines if line]
    if not found:
        raise OptionError(f"--list {path}: it names no document; write a row as web:1234, or an id, in each line")
    return found
