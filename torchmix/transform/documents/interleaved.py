"""A list of texts and images -> the parts of its document.

In: for each row a list as JSON. Out: their parts. Must hold: a text is a string, or `{type: text, text: ...}`; an image
is null, or `{type: image}`, whatever else that holds. So a list of texts with a null for each image is read as well
(OBELICS has its rows so). Texts that follow each other are joined. A list of nothing has no tokens. Cost: parsing the
JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pyarrow as pa

from torchmix.errors import SourceUnreadable
from torchmix.transform.documents.row_parts import PartsWriter, RowParts, RowsToCut

_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")


class Interleaved(msgspec.Struct, frozen=True):
    """Implements `RowCutter`."""

    place: str | None = None
    """The column that the format has put the images into the list by."""

    @property
    def cut_id(self) -> str:
        """See `RowCutter`."""
        return "interleaved-1" if self.place is None else f"interleaved-1:{self.place}"

    @property
    def highest_id(self) -> int:
        """See `RowCutter`."""
        return -1

    @property
    def places(self) -> str:
        """See `RowCutter`."""
        return "places of images in its list"

    def cut(self, rows: RowsToCut) -> RowParts:
        """See `RowCutter`."""
        writer = PartsWriter()
        for number, text in enumerate(json_of_rows(rows.texts)):
            if text is None:
                writer.null_row()
                continue
            try:
                found = contents(parsed(text))
                for part in found:
                    if part is None:
                        writer.image()
                    else:
                        writer.text(part)
            except ValueError as error:
                raise SourceUnreadable(f"row {rows.first_row + number}: {error}", row=rows.first_row + number) from None
            if found:
                writer.end_row()
            else:
                writer.null_row()
        return writer.row_parts(has_losses=False)


def json_of_rows(texts: pa.Array) -> list[bytes | None]:
    """The bytes of each row, whatever they are; `texts` is string or large_string."""
    held: list[bytes | None] = texts.cast(pa.large_string()).view(pa.large_binary()).to_pylist()
    return held


def parsed(text: bytes) -> Any:
    """What a JSON text says; half of an escaped surrogate pair is U+FFFD. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        fault = ValueError(f"it is no JSON ({error})")
    if b"\\ud" not in text.lower():
        raise fault
    try:
        return msgspec.json.decode(_HALF_OF_PAIR.sub("\ufffd", json.dumps(json.loads(text), ensure_ascii=False)))
    except (ValueError, RecursionError):
        raise fault from None


def contents(held: Any) -> list[str | None]:
    """Texts of a list, and None for each image; of a string itself.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(held, str):
        return [held]
    if not isinstance(held, list):
        raise ValueError(f"it holds a {_kind(held)} where a list of texts and images should be")
    return [_content(part) for part in held]


def _content(part: Any) -> str | None:
    if part is None or isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ValueError(f"its list holds a {_kind(part)}, neither a text nor an image")
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in ("image", "image_url"):
        return None
    raise ValueError(f"its list holds a part of type {kind!r}; text, image and image_url are read")


def _kind(held: Any) -> str:
    return {dict: "mapping", list: "list", type(None): "null"}.get(type(held), type(held).__name__)
