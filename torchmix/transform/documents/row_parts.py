"""What a row is cut into, before it becomes a document: texts, and places of items."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable
from torchmix.recipe.items import types_of_parts

# --- What a row is cut into, before it becomes a document.
#
# A part is a text that is encoded by itself, and behind it stands one thing at most; what has loss and what has none
# never share a part. The last part of a row has nothing behind it. Cost: Python objects, one for each part.

NOTHING = -1
AN_ITEM = -2


class RowParts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The parts of R rows, P in all."""

    parts: pa.Array
    """[P] large_string without nulls."""
    num_parts: Int64Array
    """[R] parts of each row; 0 for a row that is null, else at least 1."""
    behind: Int64Array
    """[P] what stands behind each part: an id, AN_ITEM, or NOTHING."""
    has_loss: NDArray[np.bool_] | None
    """[P] whether the tokens of a part are trained on; None: all are."""
    behind_has_loss: NDArray[np.bool_] | None
    """[P] the same of what stands behind it."""

    def num_places(self) -> Int64Array:
        """[R] places of items in each row."""
        stops = np.cumsum(self.num_parts)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.behind == AN_ITEM)])
        return np.asarray(before[stops] - before[stops - self.num_parts], np.int64)


class RowsToCut(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Consecutive rows of a source."""

    texts: pa.Array
    """[R] large_string: a text, or JSON."""
    num_items: Int64Array
    """[R]"""
    roles: list[list[int]] | None = None
    """[R] the role of each turn, where `texts` has contents alone."""
    first_row: int
    """Row of the file that the first one is, for messages."""


class RowCutter(Protocol):
    """Cuts the rows of a source; pure and row by row."""

    @property
    def cut_id(self) -> str:
        """What it does, with its version."""

    @property
    def highest_id(self) -> int:
        """The highest id between parts; -1 where there is none."""

    @property
    def places(self) -> str:
        """What messages call the places of items."""

    def cut(self, rows: RowsToCut) -> RowParts:
        """Cut rows.

        Raises:
            SourceUnreadable: A row is not what it should be.
        """


class PartsWriter(msgspec.Struct, kw_only=True):
    """Takes the contents of rows in order."""

    _texts: list[str] = msgspec.field(default_factory=list)
    _num_parts: list[int] = msgspec.field(default_factory=list)
    _behind: list[int] = msgspec.field(default_factory=list)
    _has_loss: list[bool] = msgspec.field(default_factory=list)
    _behind_has_loss: list[bool] = msgspec.field(default_factory=list)
    _open: list[str] = msgspec.field(default_factory=list)
    _open_has_loss: bool = True
    _first: int = 0

    def text(self, text: str, *, has_loss: bool = True) -> None:
        """Add a text; texts in a row that have loss, or have none, are one part."""
        if text:
            if self._open and has_loss != self._open_has_loss:
                self._close(NOTHING, has_loss=has_loss)
            self._open.append(text)
            self._open_has_loss = has_loss

    def id(self, token: int, *, has_loss: bool = True) -> None:
        """Add an id."""
        self._close(token, has_loss=has_loss)

    def item(self) -> None:
        """Add the place of an item."""
        self._close(AN_ITEM, has_loss=False)

    def end_row(self, *, has_loss: bool = True) -> None:
        """End a row; `has_loss`: whether what ends its document is trained on."""
        self._close(NOTHING, has_loss=has_loss)
        self._num_parts.append(len(self._texts) - self._first)
        self._first, self._open_has_loss = len(self._texts), True

    def null_row(self) -> None:
        """A row without a document."""
        self._num_parts.append(0)

    def _close(self, behind: int, *, has_loss: bool) -> None:
        self._texts.append("".join(self._open))
        self._has_loss.append(self._open_has_loss)
        self._behind.append(behind)
        self._behind_has_loss.append(has_loss)
        self._open.clear()

    def row_parts(self, *, has_losses: bool) -> RowParts:
        """All rows; `has_losses`: some of it may be without loss."""
        return RowParts(
            parts=pa.array(self._texts, pa.large_string()),
            num_parts=np.array(self._num_parts, np.int64),
            behind=np.array(self._behind, np.int64),
            has_loss=np.array(self._has_loss, np.bool_) if has_losses else None,
            behind_has_loss=np.array(self._behind_has_loss, np.bool_) if has_losses else None,
        )


# --- A text with markers -> its parts, with the place of an item at each marker.
#
# A text without markers has its items before it. Cost: a few operations on arrays.


class MarkedText(msgspec.Struct, frozen=True):
    """Implements `RowCutter`."""

    marker: str

    @property
    def cut_id(self) -> str:
        """See `RowCutter`."""
        return f"marked-1:{self.marker}"

    @property
    def highest_id(self) -> int:
        """See `RowCutter`."""
        return -1

    @property
    def places(self) -> str:
        """See `RowCutter`."""
        return f"markers {self.marker!r}"

    def cut(self, rows: RowsToCut) -> RowParts:
        """See `RowCutter`."""
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        texts, counts = rows.texts, rows.num_items
        markers = pc.fill_null(pc.count_substring(texts, self.marker), 0).to_numpy(zero_copy_only=False)
        is_null = texts.is_null().to_numpy(zero_copy_only=False)
        is_bare = (markers == 0) & (counts > 0) & ~is_null
        if is_bare.any():
            before = pa.array([self.marker * int(n) if b else "" for n, b in zip(counts, is_bare, strict=True)])
            empty = pa.scalar("", pa.large_string())
            texts = pc.binary_join_element_wise(before.cast(pa.large_string()), texts, empty)
        parts = pc.split_pattern(texts, self.marker).flatten().cast(pa.large_string())
        num_parts = np.where(is_null, 0, np.where(is_bare, counts, markers) + 1).astype(np.int64)
        behind = np.full(len(parts), AN_ITEM, np.int64)
        behind[np.cumsum(num_parts)[num_parts > 0] - 1] = NOTHING
        return RowParts(parts=parts, num_parts=num_parts, behind=behind, has_loss=None, behind_has_loss=None)


# --- A list of texts and items -> the parts of its document.
#
# A text is a string, or `{type: text, text: ...}`; an item is null, or `{type: item}`, whatever else that holds. So
# a list of texts with a null for each item is read as well (OBELICS has its rows so). Texts that follow each other
# are joined. A list of nothing has no tokens. Cost: parsing the JSON.

_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")


class Interleaved(msgspec.Struct, frozen=True):
    """Implements `RowCutter`."""

    place: str | None = None
    """The column that the format has put the items into the list by."""

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
        return "places in its list"

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
                        writer.item()
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
    """Texts of a list, and None for each item; of a string itself.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(held, str):
        return [held]
    if not isinstance(held, list):
        raise ValueError(f"it holds a {_kind(held)} where a list of texts and items should be")
    return [_content(part) for part in held]


def _content(part: Any) -> str | None:
    if part is None or isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ValueError(f"its list holds a {_kind(part)}, neither a text nor an item")
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    known = types_of_parts()
    if kind in known:
        return None
    raise ValueError(f"its list holds a part of type {kind!r}; {', '.join(('text', *known))} are read")


def _kind(held: Any) -> str:
    return {dict: "mapping", list: "list", type(None): "null"}.get(type(held), type(held).__name__)
