"""The recipe's words for a source -> how its rows become documents.

In: what the recipe, or the catalog, says of a source. Out: a `DocumentLayout`. Must hold: an id that the tokenizer does
not have is an error that says so. Cost: opening the tokenizer.
"""

from __future__ import annotations

from torchmix.errors import RecipeError
from torchmix.recipe.source.image_structs import Images
from torchmix.recipe.source.layout_structs import Chat, RowLayout
from torchmix.recipe.source.tokenizer_kind import tokenizer_kind
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT
from torchmix.transform.documents.interleaved import Interleaved
from torchmix.transform.documents.lay_out import DocumentLayout
from torchmix.transform.documents.marked import MarkedText
from torchmix.transform.documents.open_chat import open_chat
from torchmix.transform.documents.row_parts import RowCutter
from torchmix.transform.open_tokenizer import Tokenizers


def open_layout(
    source: str,
    rows: RowLayout | None,
    images: Images | None,
    tokenizers: Tokenizers,
    *,
    tokenizer: str,
    begin_id: int | str | None,
    end_id: int | str | None,
) -> DocumentLayout:
    """How rows and images of a source become documents.

    Args:
        source: Its name, for errors.
        rows: What its rows are; None: texts with markers.
        images: Those of its rows; None: there are none.
        tokenizers: Opens its tokenizer.
        tokenizer, begin_id, end_id: In the recipe's words.

    Raises:
        RecipeError: A token is none of the tokenizer's.
        SourceUnreadable: The tokenizer cannot be opened.
    """
    where = f"sources.{source}"
    is_bytes = tokenizer_kind(tokenizer) == "bytes"
    parts = tokenizers.open(source, tokenizer)
    ids = dict.fromkeys(("token", "before", "after"))
    cutter: RowCutter
    if images is not None:
        for key in ids:
            place = f"{where}.images.{key}"
            ids[key] = _id(tokenizers, source, tokenizer, getattr(images, key), place, is_bytes=is_bytes)
    marker = None if images is None else images.marker
    if rows is not None and rows.rows == "messages":
        cutter = open_chat(source, rows.chat or Chat(), tokenizers, tokenizer=tokenizer, marker=marker)
    elif rows is not None:
        cutter = Interleaved(None if images is None else images.place)
    else:
        assert marker is not None, "plain texts without images need no layout"
        cutter = MarkedText(marker)
    return DocumentLayout(
        parts=parts,
        ends_parts=is_bytes,
        begin=tokenizers.token_id(source, tokenizer, begin_id, f"{where}.begin_id"),
        end=END_OF_DOCUMENT if is_bytes else tokenizers.token_id(source, tokenizer, end_id, f"{where}.end_id"),
        token=ids["token"],
        before=ids["before"],
        after=ids["after"],
        cutter=cutter,
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
