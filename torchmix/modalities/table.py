"""The table of kinds of items: how those of each are found, measured and decoded.

A new kind is a folder beside this file, and a row of the table: its half in `recipe/items.py` says what a recipe needs
to know, its half here the rest. Code of the user's may add a row before it opens a recipe. A kind is imported when it
is first met, so that a process without such items does not pay for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from torchmix.errors import CatalogStale
from torchmix.lazy_names import imported, own_function
from torchmix.modalities.modality import Augment, Modality
from torchmix.recipe.items import items_of, key_of_items, kinds_of
from torchmix.recipe.structs import ItemWords, Source

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


def open_modality(source: str, words: ItemWords, directory: Path | None = None) -> Modality:
    """The kind of items that options of a source are of.

    Args:
        source: The source.
        words: Its options.
        directory: The recipe's folder, for whoever decodes; None: the function that alters items is not opened.

    Raises:
        CatalogStale: This process does not know the kind.
        RecipeError: A function that the options name cannot be imported.
    """
    if words.kind not in KINDS:
        raise CatalogStale(f"source {source!r} has items of the kind {words.kind!r}, which this torchmix does not read")
    where = f"sources.{source}.{key_of_items(words.kind)}"
    found = kind_named(words.kind).of(words, where)
    if directory is None or words.augment is None:
        return found
    changes = "other values; loaders and ranks that have another one refuse each other then"
    function, version = own_function(words.augment, directory, f"{where}.augment", changes=changes)
    return replace(found, augment=Augment(words=words.augment, function=function, version=version))


def open_modalities(source: str, items: Mapping[str, ItemWords]) -> dict[str, Modality]:
    """The kinds of items of a source; errors as those of `open_modality`."""
    return {kind: open_modality(source, words) for kind, words in items.items()}


def build_of(kinds: Iterable[str]) -> str:
    """The builds that decode items of some kinds here; "" where there are none."""
    return ";".join(kind_named(kind).build_id() for kind in sorted(set(kinds)))


def open_augments(sources: Mapping[str, Source], directory: Path) -> dict[tuple[str, str], Augment]:
    """The functions that alter items of a recipe's sources, by source and kind.

    Raises:
        RecipeError: One cannot be imported.
    """
    opened = {
        (name, kind): open_modality(name, words, directory).augment
        for name, source in sorted(sources.items())
        for kind, words in items_of(source).items()
    }
    return {key: augment for key, augment in opened.items() if augment is not None}


AUGMENT = "augment "
"""How the digest of the functions begins there."""
MOST_DECODER = 4096
"""Characters of what decodes items, as a state has it: three kinds of items take about 200."""


def decoder_of(sources: Mapping[str, Source], directory: Path) -> str:
    """What decodes the items of a recipe's sources here, and a digest of the functions that alter them; "" without
    items. At most MOST_DECODER characters: a digest stands for more. Errors as those of `open_augments`."""
    augments = open_augments(sources, directory)
    told = "\n".join(f"{name}\t{kind}\t{augment.augment_id}" for (name, kind), augment in augments.items())
    digest = [f"{AUGMENT}{hashlib.sha256(told.encode()).hexdigest()[:8]}"] if told else []
    text = ";".join([*filter(None, [build_of(kinds_of(sources))]), *digest])
    of_all = f"... {hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return text if len(text) <= MOST_DECODER else text[: MOST_DECODER - len(of_all)] + of_all
