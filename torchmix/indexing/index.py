"""index: bring the catalog of a recipe up to date, as `torchmix index` does.

In: a recipe, as a file or as values. Out: its catalog. Must hold: as scan.py. Cost: as scan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmix.catalog.store import Catalog
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.parts import with_all_sources
from torchmix.recipe.structs import Recipe


def index(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *,
    force: bool = False,
    keep_tokens: bool = False,
    directory: str | Path | None = None,
) -> Catalog:
    """Index the sources of all parts of a recipe, or bring their index up to date.

    Args:
        recipe: A YAML file, a `Recipe` or a mapping with its keys.
        force: Scan every file again.
        keep_tokens: Keep the ids of all rows that are tokenized or go through a map, so that reading makes none.
        directory: What paths in a `Recipe` are relative to; the current directory if not given.

    Returns:
        The catalog, opened.

    Raises:
        RecipeError: The recipe is wrong.
        CatalogError: A file is missing, unreadable or damaged, or the catalog's folder cannot be written.
    """
    checked, folder = recipe_and_directory("index", recipe, directory)
    return index_recipe(with_all_sources(checked), folder, force=force, keep_tokens=keep_tokens)
