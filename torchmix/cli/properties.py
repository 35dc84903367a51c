"""`torchmix properties add`: join a table of further properties to the rows of a source."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmix.cli.terminal import ExitCode, count_text, print_json
from torchmix.indexing.add_properties import add_properties
from torchmix.recipe.load import load_recipe, recipe_directory

HELP = "add properties to documents, from a table that is joined by their id"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    parser.add_argument("action", choices=["add"], help="what to do")
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe in YAML, whose source has an `id`")
    parser.add_argument("table", type=Path, metavar="TABLE", help="a file of Parquet, Arrow, JSON lines or CSV")
    parser.add_argument("--key", required=True, metavar="COLUMN", help="the table's column of ids")
    parser.add_argument(
        "--source", metavar="NAME", help="the source (default: as the file is named, or the only one with an id)"
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """Join the table, and say what is there now.

    Raises:
        TorchmixError: A fault in the recipe or the table; the catalog stays as it was.
    """
    recipe, directory = load_recipe(arguments.recipe), recipe_directory(arguments.recipe)
    added = add_properties(recipe, directory, arguments.table, key=arguments.key, source=arguments.source)
    values = {
        "recipe": str(arguments.recipe),
        "source": added.source,
        "properties": list(added.properties),
        "documents": added.num_documents,
    }
    if arguments.json:
        print_json(values)
    else:
        documents = count_text(added.num_documents)
        print(f"{added.source}: {documents} documents have the properties {', '.join(added.properties)}")
    return ExitCode.OK
