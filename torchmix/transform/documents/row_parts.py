"""What a row is cut into, before it becomes a document: texts, and places of items."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable
from torchmix.recipe.items import key_of_items, kind_of_part, types_of_parts

# --- What a row is cut into, before it becomes a document.
#
# A part is a text that is encoded by itself, and behind it stands one thing at most; what has loss and what has none
# never share a part. The last part of a row has nothing behind it. Kinds of items have numbers from 0, in the order of
# their names. Cost: Python objects, one for each part.

NOTHING = -1
FIRST_KIND = -2
"""Stands for an item of kind 0; one of kind k is `FIRST_KIND - k`."""


class RowParts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The parts of R rows, P in all."""

    parts: pa.Array
    """[P] large_string without nulls."""
    num_parts: Int64Array
    """[R] parts of each row; 0 for a row that is null, else at least 1."""
    behind: Int64Array
    """[P] what stands behind each part: an id, an item of a kind as FIRST_KIND says, or NOTHING."""
    has_loss: NDArray[np.bool_] | None
    """[P] whether the tokens of a part are trained on; None: all are."""
    behind_has_loss: NDArray[np.bool_] | None
    """[P] the same of what stands behind it."""
    bare: Int64Array
    """[K, 3] runs of tokens without loss inside parts that have loss: part, first token in it, tokens; ascending."""

    def num_places(self, kind: int) -> Int64Array:
        """[R] places of items of a kind in each row."""
        stops = np.cumsum(self.num_parts)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.behind == FIRST_KIND - kind)])
        return np.asarray(before[stops] - before[stops - self.num_parts], np.int64)


class RowsToCut(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Consecutive rows of a source."""

    texts: pa.Array
    """[R] large_string: a text, or JSON."""
    num_items: Int64Array
    """[kinds, R]"""
    roles: list[list[int]] | None = None
    """[R] the role of each turn, where `texts` has contents alone."""
    first_row: int
    """Row of the file that the first one is, for messages."""
    needs_loss: bool = True
    """Whether somebody asks which tokens have loss; the catalog has it where rows are read."""


class RowCutter(Protocol):
    """Cuts the rows of a source; pure and row by row."""

    @property
    def cut_id(self) -> str:
        """What it does, with its version."""

    @property
    def highest_id(self) -> int:
        """The highest id between parts; -1 where there is none."""

    @property
    def has_losses(self) -> bool:
        """Whether some tokens may have no loss."""

    @property
    def roles(self) -> Sequence[str]:
        """Roles of turns, in the order of their numbers; none where rows are no conversations."""

    def places(self, kind: str) -> str:
        """What messages call the places of items of a kind."""

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

    @property
    def num_parts_begun(self) -> int:
        """The number of the part that the next text is the first of."""
        return len(self._texts)

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

    def item(self, kind: int) -> None:
        """Add the place of an item."""
        self._close(FIRST_KIND - kind, has_loss=False)

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

    def row_parts(self, *, has_losses: bool, bare: Sequence[tuple[int, int, int]] = ()) -> RowParts:
        """All rows; `has_losses`: some of it may be without loss; `bare` as in `RowParts`."""
        return RowParts(
            parts=pa.array(self._texts, pa.large_string()),
            num_parts=np.array(self._num_parts, np.int64),
            behind=np.array(self._behind, np.int64),
            has_loss=np.array(self._has_loss, np.bool_) if has_losses else None,
            behind_has_loss=np.array(self._behind_has_loss, np.bool_) if has_losses else None,
            bare=np.array(bare, np.int64).reshape(-1, 3),
        )


# --- A text with markers -> its parts, with the place of an item at each marker.
#
# A text without markers of a kind has the items of this kind before it. Cost: a few operations on arrays for each kind.


class TextAndItems(msgspec.Struct, frozen=True):
    """What cutters of texts with items say alike: nothing lies between parts, all tokens have loss, nobody speaks."""

    @property
    def highest_id(self) -> int:
        """See `RowCutter`."""
        return -1

    @property
    def has_losses(self) -> bool:
        """See `RowCutter`."""
        return False

    @property
    def roles(self) -> Sequence[str]:
        """See `RowCutter`."""
        return ()


class MarkedText(TextAndItems, frozen=True):
    """Implements `RowCutter`."""

    markers: Mapping[str, str]
    """By kind, sorted."""

    @property
    def cut_id(self) -> str:
        """See `RowCutter`."""
        return f"marked-1:{','.join(self.markers.values())}"

    def places(self, kind: str) -> str:
        """See `RowCutter`."""
        return f"markers {self.markers[kind]!r}"

    def cut(self, rows: RowsToCut) -> RowParts:
        """See `RowCutter`."""
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        texts, is_null = rows.texts, rows.texts.is_null().to_numpy(zero_copy_only=False)
        empty = pa.scalar("", pa.large_string())
        for marker, counts in reversed(list(zip(self.markers.values(), rows.num_items, strict=True))):
            is_bare = (_count(rows.texts, marker) == 0) & (counts > 0) & ~is_null
            if is_bare.any():
                before = pa.array([marker * int(n) if b else "" for n, b in zip(counts, is_bare, strict=True)])
                texts = pc.binary_join_element_wise(before.cast(pa.large_string()), texts, empty)
        parts = texts.drop_null()
        num_parts = (~is_null).astype(np.int64)
        behind = np.full(len(parts), NOTHING, np.int64)
        for kind, marker in enumerate(self.markers.values()):
            counts = _count(parts, marker)
            stops = np.cumsum(counts + 1)
            whole, behind = behind, np.full(int(counts.sum()) + len(parts), FIRST_KIND - kind, np.int64)
            behind[stops - 1] = whole
            parts_before = np.concatenate([np.zeros(1, np.int64), stops])[np.cumsum(num_parts)]
            num_parts = np.diff(parts_before, prepend=0)
            parts = pc.split_pattern(parts, marker).flatten().cast(pa.large_string())
        bare = np.zeros((0, 3), np.int64)
        return RowParts(parts=parts, num_parts=num_parts, behind=behind, has_loss=None, behind_has_loss=None, bare=bare)


def _count(texts: pa.Array, marker: str) -> Int64Array:
    """How often a marker stands in each text; 0 in a null."""
    import pyarrow.compute as pc  # as above

    counts: Int64Array = pc.fill_null(pc.count_substring(texts, marker), 0).to_numpy(zero_copy_only=False)
    return counts.astype(np.int64)


# --- A list of texts and items -> the parts of its document.
#
# A text is a string, or `{type: text, text: ...}`; an item is `{type: item}`, whatever else that holds, or null where
# the source has items of one kind. So a list of texts with a null for each item is read as well (OBELICS has its rows
# so). Texts that follow each other are joined. A list of nothing has no tokens. Cost: parsing the JSON.

Content = list[str | int]
"""Texts, and for each item the number of its kind."""

OTHER_NAMES = {"human": "user", "gpt": "assistant"}
"""Roles as ShareGPT and LLaVA call them."""
_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")


class Interleaved(TextAndItems, frozen=True):
    """Implements `RowCutter`."""

    kinds: tuple[str, ...]
    """Sorted."""
    place: str | None = None
    """The column that the format has put the items into the list by."""

    @property
    def cut_id(self) -> str:
        """See `RowCutter`."""
        return "interleaved-1" if self.place is None else f"interleaved-1:{self.place}"

    def places(self, kind: str) -> str:
        """See `RowCutter`."""
        return "places in its list"

    def cut(self, rows: RowsToCut) -> RowParts:
        """See `RowCutter`."""

        def write(writer: PartsWriter, number: int, held: Any) -> bool:
            found = contents(held, self.kinds)
            for part in found:
                if isinstance(part, int):
                    writer.item(part)
                else:
                    writer.text(part)
            if found:
                writer.end_row()
            return bool(found)

        return written(rows, write).row_parts(has_losses=False)


def number_of_role(roles: Sequence[str], name: Any) -> int:
    """The number of a role, by its name.

    Raises:
        ValueError: It is none of `roles`.
    """
    role = OTHER_NAMES.get(name, name) if isinstance(name, str) else None
    if role is None or role not in roles:
        raise ValueError(f"it has a message of role {name!r}; the template has {', '.join(roles)}")
    return roles.index(role)


def written(rows: RowsToCut, write: Callable[[PartsWriter, int, Any], bool]) -> PartsWriter:
    """Rows of JSON, written one by one.

    Args:
        rows: A null row has no parts.
        write: Called with the number of a row and its value; whether it has written anything.

    Raises:
        SourceUnreadable: `write` has raised a ValueError, or a row is no JSON; names the row.
    """
    writer = PartsWriter()
    for number, text in enumerate(json_of_rows(rows.texts)):
        try:
            has_parts = text is not None and write(writer, number, parsed(text))
        except ValueError as error:
            raise SourceUnreadable(f"row {rows.first_row + number}: {error}", row=rows.first_row + number) from None
        if not has_parts:
            writer.null_row()
    return writer


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


def contents(held: Any, kinds: Sequence[str]) -> Content:
    """Texts of a list, and its items as numbers of their kinds; of a string itself.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(held, str):
        return [held]
    if not isinstance(held, list):
        raise ValueError(f"it holds a {_type_name(held)} where a list of texts and items should be")
    return [_content(part, kinds) for part in held]


def at_markers(text: str, markers: Sequence[str]) -> Content:
    """A text between its markers, and at each marker the number of its kind."""
    parts: Content = [text]
    for number, marker in enumerate(markers):
        cut: Content = []
        for part in parts:
            if isinstance(part, str):
                first, *rest = part.split(marker)
                cut += [first, *(piece for text in rest for piece in (number, text))]
            else:
                cut.append(part)
        parts = cut
    return parts


def _content(part: Any, kinds: Sequence[str]) -> str | int:
    if isinstance(part, str):
        return part
    if part is None:
        if len(kinds) == 1:
            return 0
        if kinds:
            named = ", ".join(f"{{type: {one}}}" for one in kinds)
            raise ValueError(f"its list holds a null, and the source has items of {len(kinds)} kinds; write {named}")
        raise ValueError("it has an item such as an image, and the source has none; name their column")
    if not isinstance(part, dict):
        raise ValueError(f"its list holds a {_type_name(part)}, neither a text nor an item")
    type_of_part = part.get("type")
    if type_of_part == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = kind_of_part(type_of_part)
    if kind is None:
        known = ", ".join(("text", *types_of_parts()))
        raise ValueError(f"its list holds a part of type {type_of_part!r}; {known} are read")
    if kind not in kinds:
        raise ValueError(
            f"it has an item of type {type_of_part!r}, and the source has none; name their column by "
            f"{key_of_items(kind)}.column"
        )
    return kinds.index(kind)


def _type_name(held: Any) -> str:
    return {dict: "mapping", list: "list", type(None): "null"}.get(type(held), type(held).__name__)
