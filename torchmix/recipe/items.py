"""The recipe's half of the table of kinds of items: their words, what these must mean, and what decides tokens.

A new kind is a folder of `modalities/` and a row of two tables: here what a recipe needs to know, in
`modalities/table.py` the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from torchmix.errors import CatalogStale, RecipeError
from torchmix.recipe.build import build, nearest
from torchmix.recipe.images import check_images
from torchmix.recipe.sounds import Sounds, check_sounds
from torchmix.recipe.sources import format_of
from torchmix.recipe.structs import Images, ItemWords, Packing, Source
from torchmix.recipe.videos import Videos, check_videos


class KindInRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe says of one kind of items."""

    words: type[ItemWords]
    """Its options."""
    check: Callable[[Any, str], None]
    """Checks options that are of this kind alone, at a path of keys; raises a RecipeError at the first fault."""
    parts: tuple[str, ...]
    """The `type` of a part that is such an item, in a list of texts and items."""
    key: str | None = None
    """The key of a source that holds its options; None: the kind, below `items`."""
    decides_nothing: tuple[str, ...] = ()
    """Options that alter no token, beside `folder`."""


KINDS: dict[str, KindInRecipe] = {
    Images.kind: KindInRecipe(
        words=Images,
        check=check_images,
        parts=("image", "image_url"),
        key="images",
        decides_nothing=("alpha", "most_pixels"),
    ),
    Sounds.kind: KindInRecipe(
        words=Sounds,
        check=check_sounds,
        parts=("audio", "audio_url", "input_audio"),
        decides_nothing=("mels", "channel", "most_seconds"),
    ),
    Videos.kind: KindInRecipe(
        words=Videos,
        check=check_videos,
        parts=("video", "video_url"),
        decides_nothing=("most_pixels", "most_seconds"),
    ),
}
"""By the name of the kind."""


def key_of_items(kind: str) -> str:
    """The key of a source that holds the options of a kind."""
    return KINDS[kind].key or f"items.{kind}"


def option_of_items(kind: str) -> str:
    """The option of a command that names the column of a kind, without its dashes."""
    return KINDS[kind].key or kind


def types_of_parts() -> list[str]:
    """The types of parts that are items of some kind."""
    return [part for row in KINDS.values() for part in row.parts]


def kind_of_part(type_of_part: object) -> str | None:
    """The kind of items that parts of a type are; None: they are none."""
    return next((kind for kind, row in sorted(KINDS.items()) if type_of_part in row.parts), None)


def items_of(source: Source) -> dict[str, ItemWords]:
    """The options of each kind of items that the rows of a source have, by kind, sorted; errors as those of
    `check_items`."""
    found: dict[str, ItemWords] = {}
    for kind, row in sorted(KINDS.items()):
        words = (source.items or {}).get(kind) if row.key is None else getattr(source, row.key)
        if words is not None:
            found[kind] = words if isinstance(words, row.words) else build(row.words, words, f"items.{kind}")
    return found


def kinds_of(sources: Mapping[str, Source]) -> list[str]:
    """The kinds of items that rows of some sources have; sorted."""
    return sorted({kind for source in sources.values() for kind in items_of(source)})


def has_items(source: Source) -> bool:
    """Whether rows of a source have items of any kind."""
    return bool(source.items) or any(row.key and getattr(source, row.key) is not None for row in KINDS.values())


def check_items(source: Source, where: str) -> None:
    """Check the items of a source; raises a RecipeError at the first fault."""
    if source.interleaved is not None and not has_items(source):
        raise RecipeError("its rows have images; say by images where they are", f"{where}.interleaved")
    for kind, words in (source.items or {}).items():
        own = sorted(name for name, row in KINDS.items() if row.key is None)
        if kind not in own:
            known = f"known are {', '.join(own)}" if own else "none is known here beside images"
            raise RecipeError(f"{kind!r} is no kind of items{nearest(kind, own)}; {known}", f"{where}.items")
        build(KINDS[kind].words, words, f"{where}.items.{kind}")
    found = items_of(source)
    if not found:
        return
    first = key_of_items(next(iter(found)))
    if source.text is None and source.messages is None and source.interleaved is None:
        raise RecipeError(f"{first} stand in texts; name the column by text, messages or interleaved", where)
    for kind, words in found.items():
        _check_words(source, words, f"{where}.{key_of_items(kind)}")
        KINDS[kind].check(words, f"{where}.{key_of_items(kind)}")
    if len(found) > 1:
        _check_together(found, where)


def _check_together(items: Mapping[str, ItemWords], where: str) -> None:
    """Check that the items of a row can be told apart."""
    for kind, words in items.items():
        key = f"{where}.{key_of_items(kind)}"
        if words.place is not None:
            others = ", ".join(key_of_items(other) for other in items if other != kind)
            message = f"is of rows with items of one kind, and these have {others}, too; write parts with their types"
            raise RecipeError(message, f"{key}.place")
        for other, others_words in items.items():
            if other < kind and words.token == others_words.token:
                message = f"{words.token!r} stands for {key_of_items(other)}, too; each kind has its own"
                raise RecipeError(message, f"{key}.token")
            if other < kind and _overlap(words.marker, others_words.marker):
                message = f"{words.marker!r} overlaps {others_words.marker!r} of {key_of_items(other)}; choose another"
                raise RecipeError(message, f"{key}.marker")


def _overlap(one: str, other: str) -> bool:
    """Whether two markers may share letters in a text."""
    shorter = min(len(one), len(other))
    ends_meet = any(one[-n:] == other[:n] or other[-n:] == one[:n] for n in range(1, shorter + 1))
    return ends_meet or one in other or other in one


def _check_words(source: Source, words: ItemWords, where: str) -> None:
    """What holds for items of all kinds."""
    what = where.rpartition(".")[2]
    if source.map is not None:
        raise RecipeError(f"a source has {what} or a map, not both; remove one", where)
    if source.keep is not None:
        raise RecipeError(f"ids of texts with {what} are not kept; remove keep", where)
    if not words.column:
        raise RecipeError(f"is empty; name the column of the {what}", f"{where}.column")
    if words.place is not None:
        if source.interleaved is None:
            raise RecipeError("is of the lists of texts of interleaved; remove it", f"{where}.place")
        if format_of(source) not in ("jsonl", "webdataset"):
            raise RecipeError("is read of JSON lines and WebDataset alone; write lists with nulls", f"{where}.place")
    if not words.marker:
        raise RecipeError("is empty; write a text such as <image>", f"{where}.marker")
    for key in ("token", "before", "after"):
        token = getattr(words, key)
        if token == "":
            raise RecipeError("is empty; name a token, or give its id", f"{where}.{key}")
        if isinstance(token, int) and not 0 <= token < 2**30:
            raise RecipeError(f"{token} is out of range; it must be in [0, 2^30)", f"{where}.{key}")


def check_packing_of_items(packing: Packing, has_items: bool) -> None:
    """Check how documents with items become samples; raises a RecipeError."""
    if has_items and packing.method == "concat":
        message = "concat cuts documents anywhere, and images must stay whole; use best_fit"
        raise RecipeError(message, "packing.method")


def order_of_items(items: Mapping[str, ItemWords]) -> list[dict[str, object]]:
    """What of them decides which tokens a document has; where the files lie, and how they are decoded, do not."""
    found: list[dict[str, object]] = []
    for kind, words in items.items():
        kept: dict[str, object] = msgspec.to_builtins(words)
        if words.place is None:
            kept.pop("place")
        for key in ("folder", *KINDS[kind].decides_nothing):
            kept.pop(key)
        found.append(kept if KINDS[kind].key else {"kind": kind, **kept})
    return found


def kept_words(items: Mapping[str, ItemWords]) -> dict[str, dict[str, Any]]:
    """The options of a source as a catalog keeps them, by kind."""
    return {kind: msgspec.to_builtins(words) for kind, words in items.items()}


def words_of(kept: Mapping[str, Mapping[str, Any]], source: str) -> dict[str, ItemWords]:
    """The inverse of `kept_words`.

    Raises:
        CatalogStale: The catalog of the source has items of a kind, or options, that are not known here.
    """
    found: dict[str, ItemWords] = {}
    for kind, words in kept.items():
        if kind not in KINDS:
            raise CatalogStale(
                f"source {source!r} has items of the kind {kind!r}, which this process does not know; import what adds "
                "it, or update torchmix"
            )
        try:
            found[kind] = msgspec.convert(words, KINDS[kind].words)
        except msgspec.ValidationError as error:
            raise CatalogStale(
                f"source {source!r}: its {kind} options are not known ({error}); index it again"
            ) from None
    return found
