"""The function that rows of a source go through, and whether their ids are kept: `map` and `keep` of a recipe.

In: sources of a recipe. Out: the words that name their functions, or a clear error. Must hold: nothing is imported
here. Cost: none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from torchmix.errors import RecipeError
from torchmix.recipe.structs import Source

_WORDS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_map(source: Source, where: str) -> None:
    """Check `map` and `keep` of a source with columns, which stands at `where`; RecipeError at the first fault."""
    if source.keep is not None and source.tokens is not None and source.map is None:
        message = "lists of tokens are ids already, so there is nothing to keep; remove the key"
        raise RecipeError(message, f"{where}.keep")
    if source.map is not None and not _WORDS.fullmatch(source.map):
        raise RecipeError(
            f"{source.map!r} names no function; write module:function, as mine.clean:licence", f"{where}.map"
        )


def maps_of(sources: Mapping[str, Source]) -> dict[str, str]:
    """The words of the function of each source that has one, by the source's name."""
    return {name: source.map for name, source in sources.items() if source.map is not None}


def takes_of(source: Source) -> Literal["text", "tokens"]:
    """What the column of a source holds."""
    return "tokens" if source.tokens is not None else "text"
