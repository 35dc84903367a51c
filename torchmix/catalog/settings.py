"""The settings of sources that a catalog is built for and opened with.

Two sources with equal settings and equal files have equal entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from torchmix.catalog.sizes import window_pages_of
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.items import items_of
from torchmix.recipe.sources import (
    FORMATS,
    column_of,
    format_of,
    layout_of,
    masks_bad_rows,
    max_bad_of,
    paths_of,
    takes_of,
)
from torchmix.recipe.structs import Fim, ItemWords, RowLayout, Shuffle, Source


class MapEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function that rows of a source went through when it was indexed. It says which; nothing is imported for it:
    that is for the recipe to name."""

    function: str
    """`module:function`, in the recipe's words."""
    takes: Literal["text", "tokens"]
    """What the column holds."""


class SourceWords(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings of a source, its entry in the manifest and the open source say alike, in the recipe's words."""

    format: str
    """What its files are, as the recipe says or their names tell: `parquet`, `megatron`."""
    column: str | None
    """The column that holds the documents; None in formats without columns."""
    tokenizer: str | None
    """The tokenizer; None where the column holds ids."""
    begin_id: int | str | None = None
    """Token before the ids of each text."""
    end_id: int | str | None = None
    """Token after the ids of each text."""
    fim: Fim | None = None
    """Fill in the middle; None where texts stay as they are."""
    map: MapEntry | None = None
    """The function that rows go through; None where they are used as they are."""
    layout: RowLayout | None = None
    """How rows become documents; None where they are plain texts or ids."""

    def words(self) -> dict[str, Any]:
        """These fields, for another struct that has them."""
        return {name: getattr(self, name) for name in SourceWords.__struct_fields__}


class SourceSettings(SourceWords, frozen=True, kw_only=True):
    """The settings of one source that the catalog depends on."""

    patterns: tuple[str, ...]
    """Paths and globs, as the recipe gives them."""
    keeps_tokens: bool
    """Whether an index run keeps the ids that it makes of rows."""
    masks_bad_rows: bool
    """Whether rows that cannot be read have no tokens; otherwise the first one is an error."""
    max_bad: Fraction
    """Part of all rows that may be bad."""
    items: dict[str, ItemWords] = {}
    """Items in the texts, or those that the column holds, by kind."""
    most_pages: int
    """`shuffle.window_pages`."""
    most_bytes: int
    """`shuffle.window_bytes`."""

    def window_pages(self, *, num_pages: int, num_tokens: int) -> int:
        """Pages of the source's shuffle window."""
        most_pages = self.most_pages * FORMATS[self.format].pages_as_one
        return window_pages_of(
            num_pages=num_pages, num_tokens=num_tokens, most_pages=most_pages, most_bytes=self.most_bytes
        )


def settings_of(sources: Mapping[str, Source], shuffle: Shuffle) -> dict[str, SourceSettings]:
    """The settings of checked sources, by name."""
    most_bytes = parse_bytes(shuffle.window_bytes, where="shuffle.window_bytes")
    return {
        name: SourceSettings(
            patterns=paths_of(source),
            format=format_of(source),
            column=column_of(source),
            tokenizer=source.tokenizer,
            begin_id=source.begin_id,
            end_id=source.end_id,
            fim=source.fim,
            map=None if source.map is None else MapEntry(function=source.map, takes=takes_of(source)),
            keeps_tokens=source.keep is not None,
            masks_bad_rows=masks_bad_rows(source),
            max_bad=max_bad_of(source),
            items=items_of(source),
            layout=layout_of(source),
            most_pages=shuffle.window_pages,
            most_bytes=most_bytes,
        )
        for name, source in sources.items()
    }


ITEM_BYTES = "item bytes"
"""The word of a catalog for what makes tokens of a column of items; no recipe can write it."""


def name_of_items(name: str, kind: str) -> str:
    """The name in a catalog of the column of items of a source; no source of a recipe has such a name."""
    return f".{name}.{kind}"


def source_of_items(name: str) -> str:
    """The source that has the items of a column by the name of the column; another name is that of a source."""
    return name[1:].rpartition(".")[0] if name.startswith(".") else name


def settings_of_items(settings: Mapping[str, SourceSettings]) -> dict[str, SourceSettings]:
    """The columns of items of these sources as sources of their own, whose documents are the bytes of a row."""
    return {
        name_of_items(name, kind): replace(
            source,
            column=words.column,
            tokenizer=ITEM_BYTES,
            begin_id=None,
            end_id=None,
            map=None,
            keeps_tokens=False,
            items={kind: words},
            layout=None,
        )
        for name, source in settings.items()
        if source.tokenizer != ITEM_BYTES
        for kind, words in source.items.items()
    }
