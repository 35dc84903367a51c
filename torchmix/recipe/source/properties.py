"""What a source says of the properties of its rows: which columns, which parts of paths.

In: `properties`, `id` and `split_by` of a source. Out: the column of each property, and the expression of each that a
path tells. Must hold: one name is one property. Cost: none.
"""

from __future__ import annotations

import re

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.structs import PathProperty, Quantiles, Source

TOKENS = "tokens"
"""A property of every row: the number of its tokens."""
FOLDERS = "dir"
"""The word of `split_by` that makes a child of each folder."""
MOST_QUANTILES = 1000


def columns_of(source: Source) -> dict[str, str]:
    """Properties that are columns of the files: name to column, by sorted name. The `id` is one."""
    given = source.properties or ()
    columns = {name: name for name in given} if isinstance(given, tuple) else {}
    if isinstance(given, dict):
        columns = {name: column for name, column in given.items() if isinstance(column, str)}
    if source.id is not None:
        columns.setdefault(source.id, source.id)
    return {name: columns[name] for name in sorted(columns)}


def path_properties_of(source: Source) -> dict[str, str]:
    """Properties that follow from the path: name to regular expression, by sorted name."""
    given = source.properties
    if not isinstance(given, dict):
        return {}
    return {name: one.path for name, one in sorted(given.items()) if isinstance(one, PathProperty)}


def check_properties(source: Source, where: str) -> None:
    """Check what a source, which stands at `where`, says of properties.

    Raises:
        RecipeError: The first fault.
    """
    columns, paths = columns_of(source), path_properties_of(source)
    if isinstance(source.properties, tuple) and len(set(source.properties)) < len(source.properties):
        raise RecipeError("names a column twice", f"{where}.properties")
    for name, column in columns.items():
        if not name or not column:
            raise RecipeError("is empty; name a column", f"{where}.{'id' if source.id == '' else 'properties'}")
    for name in [*columns, *paths]:
        if name == TOKENS:
            message = "every row has the property tokens, the number of its tokens; give this one another name"
            raise RecipeError(message, f"{where}.properties")
    for name, pattern in paths.items():
        place = f"{where}.properties.{name}.path"
        if name == source.id:
            raise RecipeError("is the name of the id, too", place)
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise RecipeError(f"{pattern!r} is no regular expression: {error}", place) from None
        if groups != 1:
            raise RecipeError(f"{pattern!r} has {groups} groups; put what is to be the value in one (...)", place)
    cut = source.split_by
    if isinstance(cut, str) and cut != FOLDERS:
        message = f"{cut!r} is not {FOLDERS!r}; write it, or {{column: NAME, quantiles: 4}}"
        raise RecipeError(message, f"{where}.split_by")
    if isinstance(cut, Quantiles):
        if not 2 <= cut.quantiles <= MOST_QUANTILES:
            message = f"{cut.quantiles} is out of range; it must be in [2, {MOST_QUANTILES}]"
            raise RecipeError(message, f"{where}.split_by.quantiles")
        if not cut.column:
            raise RecipeError(f"is empty; name a property{nearest('', columns)}", f"{where}.split_by.column")
