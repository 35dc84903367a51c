"""The table of kinds of items: how those of each are found, measured and decoded.

A new kind is a folder beside this file, and a row of the table: its half in `recipe/items.py` says what a recipe needs
to know, its half here the rest. Code of the user's may add a row before it opens a recipe. A kind is imported when it
is first met, so that a process without such items does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from torchmix.errors import CatalogStale
from torchmix.lazy_names import imported
from torchmix.modalities.modality import Modality
from torchmix.recipe.items import key_of_items
from torchmix.recipe.structs import ItemWords

KINDS: dict[str, str] = {
    "image": "torchmix.modalities.images.kind:ImageModality",
    "sound": "torchmix.modalities.sounds.kind:SoundModality",
    "video": "torchmix.modalities.videos.kind:VideoModality",
}
"""By the keys of the recipe's `KINDS`: module and class, which is below `Modality`."""


def kind_named(kind: str) -> type[Modality]:
    """The class of a kind that the table has."""
    return _class(KINDS[kind])


def all_kinds() -> dict[str, type[Modality]]:
    """The class of each kind, by its name."""
    return {kind: _class(home) for kind, home in KINDS.items()}


@lru_cache
def _class(home: str) -> type[Modality]:
    found: type[Modality] = imported(home, "KINDS")  # type: ignore[assignment]  # a class
    return found


def open_modality(source: str, words: ItemWords) -> Modality:
    """The kind of items that options of a source are of.

    Raises:
        CatalogStale: This process does not know the kind.
        RecipeError: A function that the options name cannot be imported.
    """
    if words.kind not in KINDS:
        raise CatalogStale(f"source {source!r} has items of the kind {words.kind!r}, which this torchmix does not read")
    return kind_named(words.kind).of(words, f"sources.{source}.{key_of_items(words.kind)}")


def open_modalities(source: str, items: Mapping[str, ItemWords]) -> dict[str, Modality]:
    """The kinds of items of a source; errors as those of `open_modality`."""
    return {kind: open_modality(source, words) for kind, words in items.items()}


def build_of(kinds: Iterable[str]) -> str:
    """The builds that decode items of some kinds here; "" where there are none."""
    return ";".join(kind_named(kind).build_id() for kind in sorted(set(kinds)))
