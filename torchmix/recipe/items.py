"""The recipe's half of the table of kinds of items: their words, what these must mean, and what decides tokens.

A new kind is a folder of `modalities/` and a row of two tables: here what a recipe needs to know, in
`modalities/table.py` the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchmix.errors import CatalogStale, RecipeError
from torchmix.recipe.build import build, check_ranges, nearest
from torchmix.recipe.images import PROCESSORS as PROCESSORS_OF_IMAGES
from torchmix.recipe.images import check_images
from torchmix.recipe.model_folder import ReadProcessor, options_of_folder
from torchmix.recipe.sounds import PROCESSORS as PROCESSORS_OF_SOUNDS
from torchmix.recipe.sounds import Sounds, check_sounds
from torchmix.recipe.sources import check_words, format_of
from torchmix.recipe.structs import Images, ItemWords, Packing, Source
from torchmix.recipe.videos import PROCESSORS as PROCESSORS_OF_VIDEOS
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
    """Options that alter no token, beside `folder` and `augment`."""
    processors: Mapping[str, ReadProcessor] = {}
    """By class of transformers, how the settings of a model's own processor are read as options."""


KINDS: dict[str, KindInRecipe] = {
    Images.kind: KindInRecipe(
        words=Images,
        check=check_images,
        parts=("image", "image_url"),
        key="images",
        decides_nothing=("alpha", "most_pixels", "resize", "filter", "fill", "frames", "mean", "deviation", "tower"),
        processors=PROCESSORS_OF_IMAGES,
    ),
    Sounds.kind: KindInRecipe(
        words=Sounds,
        check=check_sounds,
        parts=("audio", "audio_url", "input_audio"),
        decides_nothing=("mels", "channel", "most_seconds"),
        processors=PROCESSORS_OF_SOUNDS,
    ),
    Videos.kind: KindInRecipe(
        words=Videos,
        check=check_videos,
        parts=("video", "video_url"),
        decides_nothing=("most_pixels", "most_seconds", "mean", "deviation"),
        processors=PROCESSORS_OF_VIDEOS,
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


def type_of_items(kind: str) -> str:
    """The type of a part that is an item of a kind, as templates of models write it."""
    return (*KINDS[kind].parts, kind)[0]


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


def with_processors(source: Mapping[str, Any], directory: Path, where: str) -> dict[str, Any]:
    """The keys of a source, with what models' folders say in the place of each `processor`; keys beside it win.

    Args:
        source: Its keys as they are in a file.
        directory: What paths of folders are relative to.
        where: The path of its keys.

    Raises:
        RecipeError: A folder that cannot be read, or a processor that torchmix does not follow.
    """
    found = dict(source)
    for kind, row in KINDS.items():
        of_source: Any = found if row.key is not None else found.get("items")
        key = row.key or kind
        words = of_source.get(key) if isinstance(of_source, Mapping) else None
        if not isinstance(words, Mapping) or not isinstance(path := words.get("processor"), str):
            continue
        try:
            told = options_of_folder(directory / path, row.processors, kind)
        except RecipeError as error:
            raise RecipeError(error.message, f"{where}.{key_of_items(kind)}.processor") from None
        told |= {name: value for name, value in words.items() if name != "processor"}
        if row.key is not None:
            found[key] = told
        else:
            found["items"] = {**of_source, key: told}
    return found


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
    if words.processor is not None:
        raise RecipeError(
            "is of a recipe's file or mapping, where it is replaced by what it says", f"{where}.processor"
        )
    if not words.column:
        raise RecipeError(f"is empty; name the column of the {what}", f"{where}.column")
    if words.place is not None:
        if source.interleaved is None:
            raise RecipeError("is of the lists of texts of interleaved; remove it", f"{where}.place")
        if format_of(source) not in ("jsonl", "webdataset"):
            raise RecipeError("is read of JSON lines and WebDataset alone; write lists with nulls", f"{where}.place")
    check_ranges(words, where, most_items=(1, 1 << 20), most_item_tokens=(1, 1 << 30))
    if words.augment is not None:
        check_words(words.augment, "crops:flipped", f"{where}.augment")
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
        for key in ("place", "fixed"):
            if kept.get(key, "") is None:
                kept.pop(key)
        for key in ("processor", "folder", "most_items", "most_item_tokens", "augment", *KINDS[kind].decides_nothing):
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
