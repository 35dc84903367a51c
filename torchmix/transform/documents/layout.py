"""Parts of rows, and sizes of their items -> tokens in which each item has its places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.recipe.items import key_of_items
from torchmix.recipe.sources import is_template_file, tokenizer_kind
from torchmix.recipe.structs import Chat, ItemWords, RowLayout
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT
from torchmix.transform.documents.chat import open_chat
from torchmix.transform.documents.row_parts import FIRST_KIND, Interleaved, MarkedText, RowCutter, RowParts, RowsToCut
from torchmix.transform.open_tokenizer import Tokenizers
from torchmix.transform.tokenizer import Tokenizer

# --- What a column says of the loss of tokens -> runs of tokens without loss.
#
# 0, false and numbers below 0, as labels of -100, mean no loss; all else means loss. Cost: a few array operations for
# each row.

TRANSFORM_ID = "loss-1"


class LossFlags:
    """Takes the flags of one file; stands where a tokenizer stands."""

    transform_id = TRANSFORM_ID
    vocab_size = 2
    vocabulary = "flags"

    def __init__(self) -> None:
        """Nothing is seen yet."""
        self._without: dict[int, NDArray[np.bool_]] = {}

    def see(self, values: NDArray[np.integer[Any]], offsets: Int64Array, first_row: int, *, goes_on: bool) -> None:
        """Take the flags of some rows.

        Args:
            values: The values of all rows, end to end.
            offsets: [rows + 1] where those of each begin; with `goes_on` they count one value before the first.
            first_row: Row of the file.
            goes_on: The first row's flags follow those that it had before.
        """
        without = values <= 0
        borders = np.maximum(offsets - goes_on, 0).tolist()
        for row, (start, stop) in enumerate(pairwise(borders), first_row):
            of_row = without[start:stop]
            if goes_on and row == first_row:
                of_row = np.concatenate([self._without.get(row, of_row[:0]), of_row])
            self._without[row] = of_row

    def count(self, row: int) -> int:
        """How many flags a row has."""
        return len(self._without.get(row, ()))

    def runs(self, row: int) -> tuple[Int64Array, Int64Array]:
        """Where the runs of a row's tokens without loss begin, and how long they are."""
        borders = np.flatnonzero(np.diff(self._without[row], prepend=False, append=False))
        return borders[::2], borders[1::2] - borders[::2]

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; flags are never read."""
        raise NotImplementedError

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; flags are never read."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return f"{len(ids)} flags"


# --- Parts of rows, and sizes of their items -> tokens in which each item has its places.
#
# Pure and row by row. Places go with the items of their kind in order; another number of places is a fault of the row,
# and so is a placeholder's id in the text itself. Parts are encoded one by one, as tokenizers do around special tokens.
#
#     begin? (part (id | before? token x tokens of the item after?)?)* end?


class ItemsOfKind(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The items of one kind in consecutive rows, R rows and I items."""

    first_item_of_row: Int64Array
    """[R + 1] ascending from 0."""
    tokens: Int64Array
    """[I] places of each item in the text; 0 where the item is bad."""
    faults: Mapping[int, str]
    """What is wrong with bad items, by number."""


class ItemsOfRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The items of consecutive rows, R rows; and the roles of their turns."""

    kinds: tuple[ItemsOfKind, ...] = ()
    """In the order of `DocumentLayout.items`."""
    roles: list[list[int]] | None = None
    """[R] as `RowsToCut.roles`."""


class ItemIds(msgspec.Struct, frozen=True, kw_only=True):
    """What stands for an item of a kind in a document."""

    kind: str
    token: int
    """Stands for a part of an item."""
    before: int | None
    after: int | None
    """Ids around each item."""

    @property
    def num_around(self) -> int:
        """How many ids are around an item."""
        return (self.before is not None) + (self.after is not None)


class LaidOut(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where everything of R rows lies, without their ids."""

    tokens: Int64Array
    """[R] of each document."""
    offset_of_item: tuple[Int64Array, ...]
    """[I] by kind, the first token of each item in its document."""
    row_of_run: Int64Array
    """[K] the row of each run of tokens without loss, ascending from 0; items need not be among them."""
    offset_of_run: Int64Array
    """[K] its first token in the document."""
    tokens_of_run: Int64Array
    """[K]"""


class DocumentLayout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How rows and items become documents."""

    parts: Tokenizer
    """Encodes the parts; gives nothing around them, or one id behind each, see `ends_parts`."""
    ends_parts: bool
    """The tokenizer puts an id behind each text, which only the last part of a document keeps."""
    begin: int | None
    end: int | None
    """Ids around a document."""
    items: tuple[ItemIds, ...] = ()
    """The kinds of items in the rows, sorted by name."""
    cutter: RowCutter

    @property
    def transform_id(self) -> str:
        """What turns a row and sizes into ids, with its version."""
        of_items = [found for ids in self.items for found in (ids.token, ids.before, ids.after)]
        around = [self.begin, self.end, *(of_items or (None, None, None))]
        return f"{self.parts.transform_id}+laid-1:{','.join(map(str, around))}:{self.cutter.cut_id}"

    @property
    def vocab_size(self) -> int:
        """Ids go from 0 to one less."""
        of_items = (found for ids in self.items for found in (ids.token, ids.before, ids.after))
        ids = (self.begin, self.end, *of_items, self.cutter.highest_id)
        return max(self.parts.vocab_size, *(1 + found for found in ids if found is not None))

    def count(self, texts: pa.Array, items: ItemsOfRows, row: int, first_row: int) -> LaidOut:
        """Tokens of each document, and where its items begin.

        Args:
            texts: [rows], string or large_string, with or without nulls; a null is a document of no tokens.
            items: Those of these rows and maybe others.
            row: Number of the first text in `items`.
            first_row: As for `Tokenizer.tokenize`.

        Raises:
            SourceUnreadable: A row is at fault.
        """
        return self._layout(texts, items, row, first_row, needs_loss=True).laid_out()

    def encode(self, texts: pa.Array, items: ItemsOfRows, row: int, first_row: int) -> tuple[Int32Array, Int64Array]:
        """Ids of all documents, end to end, and where each begins; arguments and errors as those of `count`."""
        return self._encoded(self._layout(texts, items, row, first_row, needs_loss=False), first_row)

    def encode_and_lay(
        self, texts: pa.Array, items: ItemsOfRows, row: int, first_row: int, *, needs_loss: bool
    ) -> tuple[Int32Array, Int64Array, LaidOut]:
        """Both; `needs_loss`: whether runs of tokens without loss are asked for."""
        laid = self._layout(texts, items, row, first_row, needs_loss=needs_loss)
        return *self._encoded(laid, first_row), laid.laid_out()

    def _encoded(self, laid: _Layout, first_row: int) -> tuple[Int32Array, Int64Array]:
        ids, offsets = self.parts.tokenize(laid.rows.parts, first_row)
        self._check_ids(ids, offsets, laid, first_row)
        values = np.full(int(laid.tokens.sum()), self.items[0].token if self.items else 0, np.int32)
        lengths = np.diff(offsets) - self.ends_parts
        values[_ranges(laid.start_of_part, lengths)] = ids[_ranges(offsets[:-1], lengths)]
        starts = np.cumsum(laid.tokens) - laid.tokens
        is_there = laid.tokens > 0
        if self.begin is not None:
            values[starts[is_there]] = self.begin
        if self.end is not None:
            values[(starts + laid.tokens - 1)[is_there]] = self.end
        is_id = laid.rows.behind >= 0
        values[(laid.start_of_part + laid.length_of_part)[is_id]] = laid.rows.behind[is_id]
        for number, (ids_of_kind, placed) in enumerate(zip(self.items, laid.items, strict=True)):
            if number:  # the first kind's tokens are there
                values[_ranges(placed.start, placed.tokens)] = ids_of_kind.token
            if ids_of_kind.before is not None:
                values[placed.start - 1] = ids_of_kind.before
            if ids_of_kind.after is not None:
                values[placed.start + placed.tokens] = ids_of_kind.after
        return values, np.concatenate([np.zeros(1, np.int64), np.cumsum(laid.tokens)])

    def _layout(self, texts: pa.Array, items: ItemsOfRows, row: int, first_row: int, *, needs_loss: bool) -> _Layout:
        texts = texts.cast(pa.large_string()) if texts.type != pa.large_string() else texts
        taken = slice(row, row + len(texts) + 1)
        firsts = [of_kind.first_item_of_row[taken] for of_kind in items.kinds]
        for of_kind, first in zip(items.kinds, firsts, strict=True):
            _check_items(of_kind, first, texts, first_row)
        num_items = np.array([np.diff(first) for first in firsts], np.int64).reshape(len(firsts), len(texts))
        roles = None if items.roles is None else items.roles[row : row + len(texts)]
        asked = RowsToCut(texts=texts, num_items=num_items, roles=roles, first_row=first_row, needs_loss=needs_loss)
        rows = self.cutter.cut(asked)
        found: list[_ItemsToPlace] = []
        for number, (of_kind, first, counts) in enumerate(zip(items.kinds, firsts, num_items, strict=True)):
            self._check_places(rows, number, counts, first_row)
            is_placed = np.repeat(rows.num_parts > 0, counts)
            tokens = of_kind.tokens[int(first[0]) : int(first[-1])][is_placed]
            found.append(_ItemsToPlace(tokens=tokens, is_placed=is_placed))
        return self._places(rows, found, first_row)

    def _check_places(self, rows: RowParts, number: int, counts: Int64Array, first_row: int) -> None:
        """Raise for a row that has more or fewer places than items of a kind."""
        places = rows.num_places(number)
        wrong = np.flatnonzero((places != counts) & (rows.num_parts > 0))
        if len(wrong):
            at, kind = int(wrong[0]), self.items[number].kind
            raise SourceUnreadable(
                f"row {first_row + at} has {places[at]} {self.cutter.places(kind)} and {counts[at]} {kind}s; there "
                f"must be as many, or none, which puts the {kind}s before the text"
            )

    def _places(self, rows: RowParts, items: list[_ItemsToPlace], first_row: int) -> _Layout:
        length_of_part = self.parts.count_tokens(rows.parts, first_row) - self.ends_parts
        is_there = rows.num_parts > 0
        behind = (rows.behind >= 0).astype(np.int64)  # tokens behind each part
        for number, (of_kind, ids) in enumerate(zip(items, self.items, strict=True)):
            behind[rows.behind == FIRST_KIND - number] = of_kind.tokens + ids.num_around
        if self.end is not None:
            behind[np.cumsum(rows.num_parts)[is_there] - 1] = 1
        opening = np.zeros(len(length_of_part), np.int64)
        if self.begin is not None:
            opening[(np.cumsum(rows.num_parts) - rows.num_parts)[is_there]] = 1
        whole = opening + length_of_part + behind
        start = np.cumsum(whole) - whole
        row_of_part = np.repeat(np.arange(len(rows.num_parts)), rows.num_parts)
        tokens = np.zeros(len(rows.num_parts), np.int64)
        np.add.at(tokens, row_of_part, whole)
        starts = np.cumsum(tokens) - tokens
        placed: list[_PlacedItems] = []
        for number, (of_kind, ids) in enumerate(zip(items, self.items, strict=True)):
            part = np.flatnonzero(rows.behind == FIRST_KIND - number)
            begin = (start + opening + length_of_part)[part] + (ids.before is not None)
            offset = np.zeros(len(of_kind.is_placed), np.int64)
            offset[of_kind.is_placed] = begin - starts[row_of_part[part]]
            placed.append(_PlacedItems(start=begin, tokens=of_kind.tokens, offset=offset))
        return _Layout(
            rows=rows,
            row_of_part=row_of_part,
            tokens=tokens,
            start_of_part=start + opening,
            length_of_part=length_of_part,
            tokens_behind=behind,
            items=tuple(placed),
        )

    def _check_ids(self, ids: NDArray[np.integer], offsets: Int64Array, laid: _Layout, first_row: int) -> None:
        for of_kind in self.items:
            found = np.flatnonzero(ids == of_kind.token)
            if len(found):
                part = int(np.searchsorted(offsets, found[0], side="right")) - 1
                raise SourceUnreadable(
                    f"the text of row {first_row + int(laid.row_of_part[part])} holds the id {of_kind.token}, which "
                    f"stands for {of_kind.kind}s; take it out, or choose another token"
                )


def _check_items(items: ItemsOfKind, first: Int64Array, texts: pa.Array, first_row: int) -> None:
    """Raise for a bad item of some texts; `first` is [rows + 1] the first item of each."""
    for item in range(int(first[0]), int(first[-1])) if items.faults else ():
        if item in items.faults:
            at = int(first.searchsorted(item, "right")) - 1
            if texts[at].is_valid:
                raise SourceUnreadable(f"row {first_row + at}: {items.faults[item]}", row=first_row + at)


def _ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """All numbers of some ranges, end to end."""
    stops = np.cumsum(counts)
    numbers: Int64Array = np.arange(int(counts.sum())) + np.repeat(starts - (stops - counts), counts)
    return numbers


class _ItemsToPlace(NamedTuple):
    """The items of one kind in some rows."""

    tokens: Int64Array
    """[items of rows that are no null] of each."""
    is_placed: NDArray[np.bool_]
    """[items] whether its row is no null."""


class _PlacedItems(NamedTuple):
    """The same items in their documents."""

    start: Int64Array
    """[items of rows that are no null] first token of each, counted from the first row's first one."""
    tokens: Int64Array
    """[items of rows that are no null]"""
    offset: Int64Array
    """[items] first token of each in its document; 0 in a row that is null."""


class _Layout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where parts and items of some rows go, end to end."""

    rows: RowParts
    row_of_part: Int64Array
    tokens: Int64Array
    """[rows]"""
    start_of_part: Int64Array
    length_of_part: Int64Array
    tokens_behind: Int64Array
    """[parts] tokens of the item, of the id or of the end of the document behind each."""
    items: tuple[_PlacedItems, ...]
    """By kind."""

    def laid_out(self) -> LaidOut:
        row, start, stop = np.zeros((3, 0), np.int64)
        if self.rows.has_loss is not None and self.rows.behind_has_loss is not None:
            row, start, stop = self._runs_without_loss(self.rows.has_loss, self.rows.behind_has_loss)
        starts = np.cumsum(self.tokens) - self.tokens
        return LaidOut(
            tokens=self.tokens,
            offset_of_item=tuple(of_kind.offset for of_kind in self.items),
            row_of_run=row,
            offset_of_run=start - starts[row],
            tokens_of_run=stop - start,
        )

    def _runs_without_loss(
        self, has_loss: NDArray[np.bool_], behind_has_loss: NDArray[np.bool_]
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Row, start and stop of each run, counted from the first row's first token."""
        start = np.stack([self.start_of_part, self.start_of_part + self.length_of_part], axis=1).ravel()
        tokens = np.stack([self.length_of_part, self.tokens_behind], axis=1).ravel()
        chosen = ~np.stack([has_loss, behind_has_loss], axis=1).ravel() & (tokens > 0)
        row, start, tokens = np.repeat(self.row_of_part, 2)[chosen], start[chosen], tokens[chosen]
        if len(self.rows.bare):
            part, first, inside = self.rows.bare.T
            row, tokens = np.append(row, self.row_of_part[part]), np.append(tokens, inside)
            start = np.append(start, self.start_of_part[part] + first)
            by_start = np.argsort(start, kind="stable")
            row, start, tokens = row[by_start], start[by_start], tokens[by_start]
        stop = start + tokens
        goes_on = np.zeros(len(row), np.bool_)
        goes_on[1:] = (start[1:] == stop[:-1]) & (row[1:] == row[:-1])
        return row[~goes_on], start[~goes_on], stop[np.append(~goes_on[1:], True)[: len(row)]]


# --- The recipe's words for a source -> how its rows become documents.
#
# An id that the tokenizer does not have is an error that says so. Cost: opening the tokenizer.


def open_layout(
    source: str,
    rows: RowLayout | None,
    items: Mapping[str, ItemWords],
    tokenizers: Tokenizers,
    *,
    tokenizer: str,
    begin_id: int | str | None,
    end_id: int | str | None,
) -> DocumentLayout:
    """How rows and items of a source become documents.

    Args:
        source: Its name, for errors.
        rows: What its rows are; None: texts with markers.
        items: The items of its rows, by kind, sorted.
        tokenizers: Opens its tokenizer.
        tokenizer, begin_id, end_id: In the recipe's words.

    Raises:
        RecipeError: A token is none of the tokenizer's, or stands for two kinds.
        SourceUnreadable: The tokenizer cannot be opened.
    """
    where = f"sources.{source}"
    is_bytes = tokenizer_kind(tokenizer) == "bytes"
    parts = tokenizers.open(source, tokenizer)
    found: list[ItemIds] = []
    for kind, words in items.items():
        key = f"{where}.{key_of_items(kind)}"
        token, before, after = (
            _id(tokenizers, source, tokenizer, getattr(words, name), f"{key}.{name}", is_bytes=is_bytes)
            for name in ("token", "before", "after")
        )
        assert token is not None, "words have a token"
        other = next((one.kind for one in found if one.token == token), None)
        if other is not None:
            raise RecipeError(f"{words.token!r} stands for {other}s, too; each kind has its own", f"{key}.token")
        found.append(ItemIds(kind=kind, token=token, before=before, after=after))
    markers = {kind: words.marker for kind, words in items.items()}
    cutter: RowCutter
    if rows is not None and rows.chat is not None and is_template_file(rows.chat):
        from torchmix.transform.documents.chat_template import open_template  # other rows need none

        cutter = open_template(
            source,
            rows.chat,
            tokenizers,
            tokenizer=tokenizer,
            markers=markers,
            tokens_of_items=[one.token for one in found],
        )
    elif rows is not None and rows.rows == "messages":
        cutter = open_chat(source, rows.chat or Chat(), tokenizers, tokenizer=tokenizer, markers=markers)
    elif rows is not None:
        place = next((words.place for words in items.values() if words.place is not None), None)
        cutter = Interleaved(tuple(items), place)
    else:
        assert markers, "plain texts without items need no layout"
        cutter = MarkedText(markers)
    return DocumentLayout(
        parts=parts,
        ends_parts=is_bytes,
        begin=tokenizers.token_id(source, tokenizer, begin_id, f"{where}.begin_id"),
        end=END_OF_DOCUMENT if is_bytes else tokenizers.token_id(source, tokenizer, end_id, f"{where}.end_id"),
        items=tuple(found),
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
