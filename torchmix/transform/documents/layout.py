"""Parts of rows, and sizes of their items -> tokens in which each item has its places."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.recipe.items import key_of_items
from torchmix.recipe.sources import tokenizer_kind
from torchmix.recipe.structs import Chat, ItemWords, RowLayout
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT
from torchmix.transform.documents.chat import open_chat
from torchmix.transform.documents.row_parts import AN_ITEM, Interleaved, MarkedText, RowCutter, RowParts, RowsToCut
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
            values: Of all rows, end to end.
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
# Pure and row by row. Places go with items in order; another number of places is a fault of the row, and so is the
# placeholder's id in the text itself. Parts are encoded one by one, as tokenizers do around special tokens.
#
#     begin? (part (id | before? token x tokens of the item after?)?)* end?


class ItemsOfRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The items of consecutive rows, R rows and I items; and the roles of their turns."""

    first_item_of_row: Int64Array | None
    """[R + 1] ascending from 0; None: no row has any."""
    tokens: Int64Array
    """[I] places of each item in the text; 0 where the item is bad."""
    faults: dict[int, str]
    """What is wrong with bad items, by number."""
    roles: list[list[int]] | None = None
    """[R] as `RowsToCut.roles`."""

    def take(self, row: int, count: int) -> tuple[Int64Array, int, int]:
        """Items of each of some rows, [count], the first item, and the one behind the last."""
        if self.first_item_of_row is None:
            return np.zeros(count, np.int64), 0, 0
        first = self.first_item_of_row[row : row + count + 1]
        return np.diff(first), int(first[0]), int(first[-1])


class LaidOut(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where everything of R rows lies, without their ids."""

    tokens: Int64Array
    """[R] of each document."""
    offset_of_item: Int64Array
    """[I] first token of each item in its document."""
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
    token: int | None
    """Stands for a part of an item; None: there are no items."""
    before: int | None
    after: int | None
    """Ids around each item."""
    kind: str = "item"
    """What messages call an item."""
    cutter: RowCutter

    @property
    def transform_id(self) -> str:
        """What turns a row and sizes into ids, with its version."""
        around = [self.begin, self.end, self.token, self.before, self.after]
        return f"{self.parts.transform_id}+laid-1:{','.join(map(str, around))}:{self.cutter.cut_id}"

    @property
    def vocab_size(self) -> int:
        """Ids go from 0 to one less."""
        ids = (self.begin, self.end, self.token, self.before, self.after, self.cutter.highest_id)
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
        return self._layout(texts, items, row, first_row).laid_out()

    def encode(self, texts: pa.Array, items: ItemsOfRows, row: int, first_row: int) -> tuple[Int32Array, Int64Array]:
        """Ids of all documents, end to end, and where each begins; arguments and errors as those of `count`."""
        laid = self._layout(texts, items, row, first_row)
        ids, offsets = self.parts.tokenize(laid.rows.parts, first_row)
        self._check_ids(ids, offsets, laid, first_row)
        values = np.full(int(laid.tokens.sum()), self.token or 0, np.int32)
        lengths = np.diff(offsets) - self.ends_parts
        source = np.arange(lengths.sum()) + np.repeat(offsets[:-1] - (np.cumsum(lengths) - lengths), lengths)
        target = np.arange(lengths.sum()) + np.repeat(laid.start_of_part - (np.cumsum(lengths) - lengths), lengths)
        values[target] = ids[source]
        starts = np.cumsum(laid.tokens) - laid.tokens
        is_there = laid.tokens > 0
        if self.begin is not None:
            values[starts[is_there]] = self.begin
        if self.end is not None:
            values[(starts + laid.tokens - 1)[is_there]] = self.end
        is_id = laid.rows.behind >= 0
        values[(laid.start_of_part + laid.length_of_part)[is_id]] = laid.rows.behind[is_id]
        if self.before is not None:
            values[laid.start_of_item - 1] = self.before
        if self.after is not None:
            values[laid.start_of_item + laid.tokens_of_item] = self.after
        return values, np.concatenate([np.zeros(1, np.int64), np.cumsum(laid.tokens)])

    def _layout(self, texts: pa.Array, items: ItemsOfRows, row: int, first_row: int) -> _Layout:
        texts = texts.cast(pa.large_string()) if texts.type != pa.large_string() else texts
        counts, first, stop = items.take(row, len(texts))
        self._check_items(items, texts, (row, first, stop), first_row)
        roles = None if items.roles is None else items.roles[row : row + len(texts)]
        rows = self.cutter.cut(RowsToCut(texts=texts, num_items=counts, roles=roles, first_row=first_row))
        is_null, places = rows.num_parts == 0, rows.num_places()
        wrong = np.flatnonzero((places != counts) & ~is_null)
        if len(wrong):
            at = int(wrong[0])
            raise SourceUnreadable(
                f"row {first_row + at} has {places[at]} {self.cutter.places} and {counts[at]} {self.kind}s; there "
                f"must be as many, or none, which puts the {self.kind}s before the text"
            )
        item = np.arange(first, stop)[~np.repeat(is_null, counts)]
        return self._places(rows, items.tokens[item], np.repeat(is_null, counts), first_row)

    def _check_items(self, items: ItemsOfRows, texts: pa.Array, taken: tuple[int, int, int], first_row: int) -> None:
        row, first, stop = taken
        found = [item for item in range(first, stop) if item in items.faults] if items.faults else []
        if items.first_item_of_row is None:
            return
        for item in found:
            at = int(items.first_item_of_row.searchsorted(item, "right")) - 1 - row
            if texts[at].is_valid:
                raise SourceUnreadable(f"row {first_row + at}: {items.faults[item]}", row=first_row + at)

    def _places(
        self,
        rows: RowParts,
        tokens_of_item: Int64Array,
        is_of_null: NDArray[np.bool_],
        first_row: int,
    ) -> _Layout:
        length_of_part = self.parts.count_tokens(rows.parts, first_row) - self.ends_parts
        is_there = rows.num_parts > 0
        is_item = rows.behind == AN_ITEM
        around = (self.before is not None) + (self.after is not None)
        behind = (rows.behind >= 0).astype(np.int64)  # tokens behind each part
        behind[is_item] = tokens_of_item + around
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
        start_of_item = (start + opening + length_of_part)[is_item] + (self.before is not None)
        starts = np.cumsum(tokens) - tokens
        offset_of_item = np.zeros(len(is_of_null), np.int64)
        offset_of_item[~is_of_null] = start_of_item - starts[row_of_part[is_item]]
        return _Layout(
            rows=rows,
            row_of_part=row_of_part,
            tokens=tokens,
            start_of_part=start + opening,
            length_of_part=length_of_part,
            tokens_behind=behind,
            start_of_item=start_of_item,
            tokens_of_item=tokens_of_item,
            offset_of_item=offset_of_item,
        )

    def _check_ids(self, ids: NDArray[np.integer], offsets: Int64Array, laid: _Layout, first_row: int) -> None:
        found = np.flatnonzero(ids == (-1 if self.token is None else self.token))
        if len(found):
            part = int(np.searchsorted(offsets, found[0], side="right")) - 1
            raise SourceUnreadable(
                f"the text of row {first_row + int(laid.row_of_part[part])} holds the id {self.token}, which "
                f"stands for {self.kind}s; take it out, or choose another token"
            )


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
    start_of_item: Int64Array
    tokens_of_item: Int64Array
    """[items of rows that are no null] tokens of each."""
    offset_of_item: Int64Array
    """[items] where each begins in its document."""

    def laid_out(self) -> LaidOut:
        row, start, stop = np.zeros((3, 0), np.int64)
        if self.rows.has_loss is not None and self.rows.behind_has_loss is not None:
            row, start, stop = self._runs_without_loss(self.rows.has_loss, self.rows.behind_has_loss)
        starts = np.cumsum(self.tokens) - self.tokens
        return LaidOut(
            tokens=self.tokens,
            offset_of_item=self.offset_of_item,
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
        row, start = np.repeat(self.row_of_part, 2)[chosen], start[chosen]
        stop = start + tokens[chosen]
        goes_on = np.zeros(len(row), np.bool_)
        goes_on[1:] = (start[1:] == stop[:-1]) & (row[1:] == row[:-1])
        return row[~goes_on], start[~goes_on], stop[np.append(~goes_on[1:], True)[: len(row)]]


# --- The recipe's words for a source -> how its rows become documents.
#
# An id that the tokenizer does not have is an error that says so. Cost: opening the tokenizer.


def open_layout(
    source: str,
    rows: RowLayout | None,
    words: ItemWords | None,
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
        words: The items of its rows; None: there are none.
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
    if words is not None:
        for key in ids:
            place = f"{where}.{key_of_items(words.kind)}.{key}"
            ids[key] = _id(tokenizers, source, tokenizer, getattr(words, key), place, is_bytes=is_bytes)
    marker = None if words is None else words.marker
    if rows is not None and rows.rows == "messages":
        cutter = open_chat(source, rows.chat or Chat(), tokenizers, tokenizer=tokenizer, marker=marker)
    elif rows is not None:
        cutter = Interleaved(None if words is None else words.place)
    else:
        assert marker is not None, "plain texts without items need no layout"
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
        kind="item" if words is None else words.kind,
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
