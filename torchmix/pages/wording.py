"""Errors that speak of recipes and commands -> the same errors in the words of `open_pages`.

In: errors of the rooms above, which know a recipe and `torchmix index`. Out: the same error, of the same type, with
what a user of `open_pages` can do; a RecipeError becomes an OptionError that names the argument. Must hold: the facts
in a message stay. Cost: none where there is no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torchmix.errors import CatalogError, OptionError, RecipeError

AGAIN = "open them with open_pages(..., update=True)"
"""What `torchmix index` is for a user who has no recipe."""
COMMAND = re.compile(
    r"run `?torchmix index`?( again| to build (it|the catalog)( again)?| to add them| with this recipe)?"
)


@contextmanager
def in_words_of_pages(name: str) -> Iterator[None]:
    """Reword the errors of a block.

    Args:
        name: Of the files in the index: the source of the recipe that stands for them.
    """
    try:
        yield
    except CatalogError as error:
        error.args = (COMMAND.sub(AGAIN, error.message), *error.args[1:])
        raise
    except RecipeError as error:
        raise OptionError(f"open_pages: {_argument(error.where, name)}{error.message}") from None


def _argument(where: str, name: str) -> str:
    """`tokens: ` for `sources.pages.tokens`; nothing for the whole source, whose faults name their arguments."""
    argument = where.removeprefix(f"sources.{name}").lstrip(".").removeprefix("shuffle.").removeprefix("read.")
    return f"{argument}: " if argument else ""
