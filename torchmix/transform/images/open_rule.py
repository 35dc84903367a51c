"""The recipe's words for images -> a size rule and placeholders.

In: `images` of a checked source, and its tokenizer. Out: a `SizeRule`, and `Placeholders`. Must hold: an id that the
tokenizer does not have is an error that says so. Cost: importing the user's function, opening the tokenizer.
"""

from __future__ import annotations

from torchmix.errors import RecipeError
from torchmix.recipe.source.image_structs import Images
from torchmix.recipe.source.images import canvases_of, pixel_bounds
from torchmix.recipe.source.tokenizer_kind import tokenizer_kind
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT
from torchmix.transform.images.anyres import AnyresRule
from torchmix.transform.images.dynamic import DynamicRule
from torchmix.transform.images.own_rule import OwnRule, import_function
from torchmix.transform.images.placeholders import Placeholders
from torchmix.transform.images.rule import SizeRule
from torchmix.transform.images.tiles import TilesRule
from torchmix.transform.open_tokenizer import Tokenizers


def rule_of(images: Images, where: str) -> SizeRule:
    """The size rule of a source; `where` is the path of keys of its `images`."""
    patch, merge = images.patch, images.merge
    if images.tiles is not None:
        tiles = images.tiles
        return TilesRule(patch=patch, merge=merge, size=tiles.size, min=tiles.min, max=tiles.max)
    if images.anyres is not None:
        return AnyresRule(patch=patch, size=images.anyres.size, canvases=canvases_of(images, where))
    if images.size is not None:
        function = import_function(images.size, f"{where}.size")
        return OwnRule(name=images.size, function=function, patch=patch, merge=merge)
    least, most = pixel_bounds(images)
    return DynamicRule(patch=patch, merge=merge, min_pixels=least, max_pixels=most)


def placeholders_of(
    source: str,
    images: Images,
    tokenizers: Tokenizers,
    *,
    tokenizer: str,
    begin_id: int | str | None,
    end_id: int | str | None,
) -> Placeholders:
    """How texts and images of a source become documents.

    Raises:
        RecipeError: A token is none of the tokenizer's.
        SourceUnreadable: The tokenizer cannot be opened.
    """
    where = f"sources.{source}"
    is_bytes = tokenizer_kind(tokenizer) == "bytes"
    parts = tokenizers.open(source, tokenizer)
    ids = {
        key: _id(tokenizers, source, tokenizer, getattr(images, key), f"{where}.images.{key}", is_bytes=is_bytes)
        for key in ("token", "before", "after")
    }
    token = ids["token"]
    assert token is not None, "the recipe names it"
    return Placeholders(
        parts=parts,
        ends_parts=is_bytes,
        begin=tokenizers.token_id(source, tokenizer, begin_id, f"{where}.begin_id"),
        end=END_OF_DOCUMENT if is_bytes else tokenizers.token_id(source, tokenizer, end_id, f"{where}.end_id"),
        token=token,
        before=ids["before"],
        after=ids["after"],
        marker=images.marker,
    )


def _id(
    tokenizers: Tokenizers, source: str, tokenizer: str, token: int | str | None, where: str, *, is_bytes: bool
) -> int | None:
    if token is None:
        return None
    if is_bytes:
        if not isinstance(token, int) or token <= END_OF_DOCUMENT:
            message = f"{token!r} is no free id: bytes takes 0 to {END_OF_DOCUMENT}; write an id above these"
            raise RecipeError(message, where)
        return token
    found = tokenizers.token_id(source, tokenizer, token, where)
    if found is not None and not tokenizers.has_id(source, tokenizer, found):
        raise RecipeError(f"{token!r} is no id of the tokenizer {tokenizer}", where)
    return found
