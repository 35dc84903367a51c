"""The table of kinds of items: how those of each are found, measured and decoded.

A new kind is a folder beside this file, and a row of the table: its half in `recipe/items.py` says what a recipe needs
to know, its half here the rest. Code of the user's may add a row before it opens a recipe.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from torchmix.errors import CatalogStale, CorruptPage, ItemUnreadable
from torchmix.modalities.images.kind import ImageKind
from torchmix.modalities.modality import KindOfItems, Modality, PlannedItem
from torchmix.recipe.items import key_of_items
from torchmix.recipe.structs import ItemWords

logger = logging.getLogger(__name__)

KINDS: dict[str, KindOfItems] = {"image": ImageKind()}
"""By the keys of the recipe's `KINDS`."""


def open_modality(source: str, words: ItemWords) -> Modality:
    """The kind of items that options of a source are of.

    Raises:
        CatalogStale: This process does not know the kind.
        RecipeError: A function that the options name cannot be imported.
    """
    if words.kind not in KINDS:
        raise CatalogStale(f"source {source!r} has items of the kind {words.kind!r}, which this torchmix does not read")
    return KINDS[words.kind].modality(words, f"sources.{source}.{key_of_items(words.kind)}")


def open_modalities(source: str, items: Mapping[str, ItemWords]) -> dict[str, Modality]:
    """The kinds of items of a source; errors as those of `open_modality`."""
    return {kind: open_modality(source, words) for kind, words in items.items()}


def build_of(kinds: Iterable[str]) -> str:
    """The builds that decode items of some kinds here; "" where there are none."""
    return ";".join(KINDS[kind].build_id() for kind in sorted(set(kinds)))


def units_of(modality: Modality, planned: PlannedItem, content: bytes | memoryview, *, is_masked: bool) -> NDArray[Any]:
    """The units of an item; what stands for it, with a warning, where it cannot be read and its source masks bad rows.

    Raises:
        CorruptPage: It cannot be read as it was indexed, and its source does not mask.
    """
    try:
        return modality.decode(content, planned.measures)
    except ItemUnreadable as error:
        what = f"source {planned.source!r}: {modality.kind} {planned.number} of row {planned.row}: {error}"
        if not is_masked:
            raise CorruptPage(what) from None
        logger.warning("%s - it comes as %s, as bad_rows: mask says", what, modality.stand_in_name)
        return modality.stand_in(planned.measures)
