"""Texts with markers, and sizes of their images -> tokens in which each image has its places.

In: texts, and the tokens of the images of each row. Out: ids, or their number, and where each image begins in its
document. Must hold: pure and row by row. Markers go with images in order; a text without markers has its images before
it; any other number of markers is a fault of the row, and so is the placeholder's id in the text itself. The parts
between markers are encoded one by one, as tokenizers do around special tokens. Cost: that of the tokenizer, and a few
array operations.

    begin? part (before? token x tokens of the image after? part)* end?
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.errors import SourceUnreadable
from torchmix.transform.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImagesOfRows:
    """The images of consecutive rows, R rows and I images."""

    first_item_of_row: Int64Array
    """[R + 1] ascending from 0."""
    tokens: Int64Array
    """[I] places of each image in the text; 0 where the image is bad."""
    faults: dict[int, str]
    """What is wrong with bad images, by number."""

    def take(self, row: int, count: int) -> tuple[Int64Array, int, int]:
        """Images of each of some rows, [count], the first image, and the one behind the last."""
        first = self.first_item_of_row[row : row + count + 1]
        return np.diff(first), int(first[0]), int(first[-1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placeholders:
    """How texts and images become documents."""

    parts: Tokenizer
    """Encodes the parts between markers; gives nothing around them, or one id behind each, see `ends_parts`."""
    ends_parts: bool
    """The tokenizer puts an id behind each text, which only the last part of a document keeps."""
    begin: int | None
    end: int | None
    """Ids around a document."""
    token: int
    before: int | None
    after: int | None
    marker: str

    @property
    def transform_id(self) -> str:
        """What turns a text and sizes into ids, with its version."""
        around = [self.begin, self.end, self.token, self.before, self.after]
        return f"{self.parts.transform_id}+placeholders-1:{','.join(map(str, around))}:{self.marker}"

    @property
    def vocab_size(self) -> int:
        """Ids go from 0 to one less."""
        ids = (self.begin, self.end, self.token, self.before, self.after)
        return max(self.parts.vocab_size, *(1 + found for found in ids if found is not None))

    def count(self, texts: pa.Array, images: ImagesOfRows, row: int, first_row: int) -> tuple[Int64Array, Int64Array]:
        """Tokens of each document, [rows], and the offset of each of their images in its document.

        Args:
            texts: [rows], string or large_string, with or without nulls; a null is a document of no tokens.
            images: Those of these rows and maybe others.
            row: Number of the first text in `images`.
            first_row: As for `Tokenizer.tokenize`.

        Raises:
            SourceUnreadable: A row is at fault.
        """
        laid = self._layout(texts, images, row, first_row)
        return laid.tokens, laid.offset_of_image

    def encode(self, texts: pa.Array, images: ImagesOfRows, row: int, first_row: int) -> tuple[Int32Array, Int64Array]:
        """Ids of all documents, end to end, and where each begins; arguments and errors as those of `count`."""
        laid = self._layout(texts, images, row, first_row)
        ids, offsets = self.parts.tokenize(laid.parts, first_row)
        self._check_ids(ids, offsets, laid, first_row)
        values = np.full(int(laid.tokens.sum()), self.token, np.int32)
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
        if self.before is not None:
            values[laid.start_of_image - 1] = self.before
        if self.after is not None:
            values[laid.start_of_image + laid.tokens_of_image] = self.after
        return values, np.concatenate([np.zeros(1, np.int64), np.cumsum(laid.tokens)])

    def _layout(self, texts: pa.Array, images: ImagesOfRows, row: int, first_row: int) -> _Layout:
        texts = texts.cast(pa.large_string()) if texts.type != pa.large_string() else texts
        counts, first, stop = images.take(row, len(texts))
        for image in range(first, stop):
            if image in images.faults:
                at = int(np.searchsorted(images.first_item_of_row, image, side="right")) - 1 - row
                if texts[at].is_valid:
                    raise SourceUnreadable(f"row {first_row + at}: {images.faults[image]}")
        markers = pc.fill_null(pc.count_substring(texts, self.marker), 0).to_numpy(zero_copy_only=False)
        is_null = texts.is_null().to_numpy(zero_copy_only=False)
        is_bare = (markers == 0) & (counts > 0) & ~is_null
        wrong = np.flatnonzero((markers != counts) & ~is_bare & ~is_null)
        if len(wrong):
            at = int(wrong[0])
            raise SourceUnreadable(
                f"row {first_row + at} has {markers[at]} markers {self.marker!r} and {counts[at]} images; "
                "there must be as many, or no marker, which puts the images before the text"
            )
        if is_bare.any():
            before = pa.array([self.marker * int(n) if b else "" for n, b in zip(counts, is_bare, strict=True)])
            empty = pa.scalar("", pa.large_string())
            texts = pc.binary_join_element_wise(before.cast(pa.large_string()), texts, empty)
        split = pc.split_pattern(texts, self.marker)
        parts = split.flatten().cast(pa.large_string())
        num_parts = np.where(is_null, 0, counts + 1)
        image = np.arange(first, stop)[~np.repeat(is_null, counts)]
        return self._places(parts, num_parts, images.tokens[image], np.repeat(is_null, counts), first_row)

    def _places(
        self,
        parts: pa.Array,
        num_parts: Int64Array,
        tokens_of_image: Int64Array,
        is_of_null: NDArray[np.bool_],
        first_row: int,
    ) -> _Layout:
        length_of_part = self.parts.count_tokens(parts, first_row) - self.ends_parts
        is_there = num_parts > 0
        last = np.cumsum(num_parts)[is_there] - 1
        around = (self.before is not None) + (self.after is not None)
        behind = np.zeros(len(parts), np.int64)  # what stands behind each part: its image, and ids around that
        is_last = np.zeros(len(parts), np.bool_)
        is_last[last] = True
        behind[~is_last] = tokens_of_image + around
        if self.end is not None:
            behind[is_last] = 1
        opening = np.zeros(len(parts), np.int64)
        if self.begin is not None:
            opening[(np.cumsum(num_parts) - num_parts)[is_there]] = 1
        whole = opening + length_of_part + behind
        start = np.cumsum(whole) - whole
        row_of_part = np.repeat(np.arange(len(num_parts)), num_parts)
        tokens = np.zeros(len(num_parts), np.int64)
        np.add.at(tokens, row_of_part, whole)
        start_of_image = (start + opening + length_of_part)[~is_last] + (self.before is not None)
        starts = np.cumsum(tokens) - tokens
        offset_of_image = np.zeros(len(is_of_null), np.int64)
        offset_of_image[~is_of_null] = start_of_image - starts[row_of_part[~is_last]]
        return _Layout(
            parts=parts,
            row_of_part=row_of_part,
            tokens=tokens,
            start_of_part=start + opening,
            start_of_image=start_of_image,
            tokens_of_image=tokens_of_image,
            offset_of_image=offset_of_image,
        )

    def _check_ids(self, ids: NDArray[np.integer], offsets: Int64Array, laid: _Layout, first_row: int) -> None:
        found = np.flatnonzero(ids == self.token)
        if len(found):
            part = int(np.searchsorted(offsets, found[0], side="right")) - 1
            raise SourceUnreadable(
                f"the text of row {first_row + int(laid.row_of_part[part])} holds the id {self.token}, which "
                "stands for images; take it out, or choose another token"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layout:
    """Where parts and images of some rows go, end to end."""

    parts: pa.Array
    row_of_part: Int64Array
    tokens: Int64Array
    """[rows]"""
    start_of_part: Int64Array
    start_of_image: Int64Array
    tokens_of_image: Int64Array
    """[images of rows that are no null] tokens of each."""
    offset_of_image: Int64Array
    """[images] where each begins in its document."""
