"""What a catalog is opened and built for: the settings of its sources.

In: the sources of a recipe, or of one of its parts, and how they are shuffled. Out: of each source what the catalog
depends on, and nothing else. Must hold: two sources with equal settings and equal files have equal entries. Cost: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from torchmix.catalog.sizes import window_pages_of
from torchmix.recipe.bad_rows import masks_bad_rows, max_bad_of
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.source_format import format_of, paths_of
from torchmix.recipe.structs import Shuffle, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """What a recipe says of one source, as far as the catalog depends on it."""

    patterns: tuple[str, ...]
    """Paths and globs, as the recipe gives them."""
    format: str
    """What its files are: `parquet`, `megatron`."""
    column: str | None
    """The column that holds the documents; None in formats without columns."""
    tokenizer: str | None
    """What turns text into ids; None where the column holds ids."""
    begin_id: int | str | None
    """What stands before the ids of a text."""
    end_id: int | str | None
    """What stands after the ids of a text."""
    masks_bad_rows: bool
    """Rows that cannot be read have no tokens; else the first one is an error."""
    max_bad: Fraction
    """Up to this part of all rows."""
    most_pages: int
    """`shuffle.window_pages`."""
    most_bytes: int
    """`shuffle.window_bytes`."""

    def window_pages(self, *, num_pages: int, num_tokens: int) -> int:
        """Pages of the source's shuffle window."""
        return window_pages_of(
            num_pages=num_pages, num_tokens=num_tokens, most_pages=self.most_pages, most_bytes=self.most_bytes
        )


def settings_of(sources: Mapping[str, Source], shuffle: Shuffle) -> dict[str, SourceSettings]:
    """The settings of checked sources, by name."""
    most_bytes = parse_bytes(shuffle.window_bytes, where="shuffle.window_bytes")
    return {
        name: SourceSettings(
            patterns=paths_of(source),
            format=format_of(source),
            column=source.tokens if source.text is None else source.text,
            tokenizer=source.tokenizer,
            begin_id=source.begin_id,
            end_id=source.end_id,
            masks_bad_rows=masks_bad_rows(source),
            max_bad=max_bad_of(source),
            most_pages=shuffle.window_pages,
            most_bytes=most_bytes,
        )
        for name, source in sources.items()
    }
