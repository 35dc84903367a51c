"""`torchmix query`: SQL over the properties of a recipe's rows.

Cost: DuckDB's, over the columns that the query names.
"""

from __future__ import annotations

import argparse
from typing import Any

from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.properties import run_query
from torchmix.cli.run import open_recipe
from torchmix.cli.terminal import ExitCode, add_part, add_recipe, print_json, print_table

HELP = "ask the properties of a recipe's documents, in SQL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    parser.add_argument(
        "sql",
        metavar="SQL",
        help='a query, as "select lang, count(*), sum(tokens) from web group by 1"; tables are sources and selections',
    )
    add_part(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run the query, and print its rows.

    Raises:
        OptionError: It is no query over these tables.
        TorchmixError: The recipe is wrong, or not indexed.
    """
    _, _, part, catalog = open_recipe(arguments.recipe, arguments.part)
    found = run_query(arguments.sql, part, catalog, read_manifest(catalog.directory).properties)
    if arguments.json:
        rows = [dict(zip(found.columns, map(_plain, row), strict=True)) for row in found.rows]
        print_json({"recipe": str(arguments.recipe), "part": arguments.part, "rows": rows})
    elif found.columns:
        columns = dict.fromkeys(_distinct(found.columns), "")
        print_table(columns, [tuple(map(_text, row)) for row in found.rows], explain=False)
    return ExitCode.OK


def _distinct(names: tuple[str, ...]) -> list[str]:
    """Names with a number where one comes again: a table has one column of each."""
    return [name if name not in names[:i] else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """A value for JSON."""
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
