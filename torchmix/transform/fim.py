"""Fill in the middle: texts, or ids, that are at a rate cut in three, their middle last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable
from torchmix.recipe.structs import Fim
from torchmix.transform.tokenizer import EncodedRows, Ids, RowsToEncode, Tokenizer

# --- A text -> whether it is cut, where, and in which order its parts come.
#
# A hash of the text's bytes decides, so that an epoch is as the other and no place in a file matters. Sources: Bavarian
# et al., "Efficient training of language models to fill in the middle" (arXiv:2207.14255), whose second variant puts
# the suffix first; the FIM dataset of Megatron-LM has the same orders:
#
#     prefix first    PREFIX prefix SUFFIX suffix MIDDLE middle
#     suffix first    PREFIX SUFFIX suffix MIDDLE prefix middle
#
# What stands before and after the ids of every text stays there, and a text without content stays as it is. Cost:
# beside the tokenizer's some 10 us a text that is cut; between characters it encodes the parts once more.

_PERSON = b"torchmix-fim-1"
_WHOLE = 1 << 64


class Cut(NamedTuple):
    """What is done with one text."""

    row: int
    """Its number among those at hand."""
    is_suffix_first: bool
    first: int
    """A number from 0 to 2^64 - 1, of which a place is made."""
    second: int

    def places(self, length: int) -> tuple[int, int]:
        """Where prefix and middle end, in a text of so many parts."""
        found = sorted((self.first % (length + 1), self.second % (length + 1)))
        return found[0], found[1]


def _parts_of_whole(*parts: float) -> list[int]:
    return [int(Fraction(str(part)) * _WHOLE) for part in parts]


def _drawn(row: int, content: bytes, person: bytes, *, spm: int) -> tuple[int, Cut]:
    """The number that is below the rate of what is cut, and how it is cut then."""
    digest = hashlib.blake2b(content, digest_size=32, person=person).digest()
    drawn, way, first, second = (int.from_bytes(digest[at : at + 8], "little") for at in range(0, 32, 8))
    return drawn, Cut(row, way < spm, first, second)


def in_order(
    ids: tuple[int, int, int], prefix: Ids, middle: Ids, suffix: Ids, *, is_suffix_first: bool
) -> list[Ids | list[int]]:
    """The parts of a text in their order, with the tokens between them; `ids` of prefix, middle and suffix."""
    of_prefix, of_middle, of_suffix = ids
    if is_suffix_first:
        return [[of_prefix, of_suffix], suffix, [of_middle], prefix, middle]
    return [[of_prefix], prefix, [of_suffix], suffix, [of_middle], middle]


class FimTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """See `Tokenizer`; equal for equal options."""

    inner: Tokenizer
    fim: Fim
    ids: tuple[int, int, int]
    """The tokens of `Fim.ids`."""
    around: tuple[int, int]
    """Tokens that the inner tokenizer puts before and after the ids of each text."""

    @property
    def transform_id(self) -> str:
        """See `Tokenizer`."""
        told = ",".join(map(str, (self.fim.rate, self.fim.spm, self.fim.by, *self.ids)))
        return f"{self.inner.transform_id}+fim-1:{told}"

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer`."""
        return max(self.inner.vocab_size, max(self.ids) + 1)

    @property
    def vocabulary(self) -> str:
        """See `Tokenizer`."""
        return self.inner.vocabulary

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self.inner.decode(ids)

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, NDArray[np.int64]]:
        """See `Tokenizer`."""
        values, offsets = self.inner.tokenize(texts, first_row)
        begin, end = self.around
        cuts = [cut for cut in self._cuts(texts) if offsets[cut.row + 1] - offsets[cut.row] > begin + end]
        kind = np.result_type(values.dtype, np.min_scalar_type(max(self.ids)))
        parts: list[Ids | list[int]] = []
        counts, done = np.diff(offsets), 0
        for cut, (prefix, middle, suffix) in zip(
            cuts, self._three(texts, first_row, cuts, values, offsets), strict=True
        ):
            start, stop = int(offsets[cut.row]) + begin, int(offsets[cut.row + 1]) - end
            made = in_order(self.ids, prefix, middle, suffix, is_suffix_first=cut.is_suffix_first)
            parts += [values[done:start], *made]
            counts[cut.row] = begin + end + sum(map(len, made))
            done = stop
        parts.append(values[done:])
        found: Ids = np.concatenate([np.asarray(part, kind) for part in parts])
        return found, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `Tokenizer`."""
        if self.fim.by == "character":
            return np.asarray(np.diff(self.tokenize(texts, first_row)[1]), np.int64)
        counts: NDArray[np.int64] = self.inner.count_tokens(texts, first_row).copy()
        for cut in self._cuts(texts):
            if counts[cut.row] > sum(self.around):
                counts[cut.row] += len(self.ids)
        return counts

    def _cuts(self, texts: pa.Array) -> list[Cut]:
        """Those texts that are cut, by their rows; nulls never are."""
        rate, spm = _parts_of_whole(self.fim.rate, self.fim.spm)
        drawn = [
            _drawn(row, text, _PERSON, spm=spm)
            for row, text in enumerate(texts.cast(pa.large_binary()).to_pylist())
            if text
        ]
        return [cut for number, cut in drawn if number < rate]

    def _three(
        self, texts: pa.Array, first_row: int, cuts: Sequence[Cut], values: Ids, offsets: Int64Array
    ) -> list[tuple[Ids, Ids, Ids]]:
        """Prefix, middle and suffix of each text that is cut, without what stands around texts."""
        begin, end = self.around
        found = []
        if self.fim.by == "token":
            for cut in cuts:
                ids = values[int(offsets[cut.row]) + begin : int(offsets[cut.row + 1]) - end]
                low, high = cut.places(len(ids))
                found.append((ids[:low], ids[low:high], ids[high:]))
            return found
        strings: list[str] = []
        for cut in cuts:
            try:
                text = texts[cut.row].as_py()
            except UnicodeDecodeError as error:
                row = first_row + cut.row
                raise SourceUnreadable(
                    f"row {row} is not valid UTF-8, and fim by character cuts it", row=row
                ) from error
            low, high = cut.places(len(text))
            strings += [text[:low], text[low:high], text[high:]]
        ids, stops = self.inner.tokenize(pa.array(strings, pa.large_string()), 0)
        each = [
            ids[start + begin : max(stop - end, start + begin)]
            for start, stop in zip(stops[:-1].tolist(), stops[1:].tolist(), strict=True)
        ]
        return [(each[at], each[at + 1], each[at + 2]) for at in range(0, len(each), 3)]


# --- Ids of a row -> the same, in which some stretches are cut: what lies between two tokens that end documents.
#
# A hash of the ids as int32, lowest byte first, decides of each stretch, whatever type a file has. A stretch with the
# token `split` is one of several files: if its hash says so, each file is cut at `fragment_rate` by its own hash, as
# Megatron-LM's GPTFIMDataset (main, d98e8a6) does. What is empty stays, and so do the tokens between. Cost: some 8 us
# a stretch, as much again where it is cut, and 10 ns a token.

_PERSON_OF_IDS = b"torchmix-fim-ids"


class FimOfIds(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `RowEncoder`."""

    fim: Fim

    @property
    def takes(self) -> Literal["text", "tokens"]:
        """See `RowEncoder`."""
        return "tokens"

    @property
    def is_mapped(self) -> bool:
        """See `RowEncoder`; the ids alone decide."""
        return False

    @property
    def transform_id(self) -> str:
        """What turns ids into others, with its version."""
        fim = self.fim
        told = (fim.rate, fim.spm, *fim.ids, fim.eod, fim.split, fim.fragment_rate)
        return f"fim-ids-1:{','.join('' if one is None else str(one) for one in told)}"

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """See `RowEncoder`."""
        offsets = asked.rows.offsets.to_numpy().astype(np.int64)
        values = asked.rows.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        offsets -= offsets[0]
        marks = tuple(int(token) for token in self.fim.ids)
        kind = np.result_type(values.dtype, np.min_scalar_type(max(marks)))
        counts, done, parts = np.diff(offsets), 0, list[Ids | list[int]]()
        for start, stop, cut in self._cuts(values, offsets):
            first, second = cut.places(stop - start)
            ids = values[start:stop]
            made = in_order(
                marks,  # type: ignore[arg-type]
                ids[:first],
                ids[first:second],
                ids[second:],
                is_suffix_first=cut.is_suffix_first,
            )
            parts += [values[done:start], *made]
            counts[cut.row] += len(marks)
            done = stop
        parts.append(values[done:])
        found: Ids = np.concatenate([np.asarray(part, kind) for part in parts])
        return EncodedRows(values=found, offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))

    def _cuts(self, values: Ids, offsets: Int64Array) -> Iterator[tuple[int, int, Cut]]:
        """Stretches that are cut, ascending: where each begins and ends in `values`, and how it is cut."""
        rate, spm, of_fragments = _parts_of_whole(self.fim.rate, self.fim.spm, self.fim.fragment_rate or 0)
        content = np.ascontiguousarray(values, "<i4").tobytes()
        for row, start, stop in _stretches(values, offsets, self.fim.eod):
            number, cut = _drawn(row, content[4 * start : 4 * stop], _PERSON_OF_IDS, spm=spm)
            if number >= rate:
                continue
            files = list(_between(values, start, stop, self.fim.split))
            if files == [(start, stop)]:
                yield start, stop, cut
                continue
            for first, last in files:
                number, cut = _drawn(row, content[4 * first : 4 * last], _PERSON_OF_IDS, spm=spm)
                if number < of_fragments:
                    yield first, last, cut


def _stretches(values: Ids, offsets: Int64Array, eod: int | None) -> Iterator[tuple[int, int, int]]:
    """Row, start and stop of what lies between tokens that end documents, where it is not empty."""
    for row, (start, stop) in enumerate(pairwise(offsets.tolist())):
        for first, last in _between(values, start, stop, eod):
            yield row, first, last


def _between(values: Ids, start: int, stop: int, token: int | None) -> Iterator[tuple[int, int]]:
    """What of a range lies between places of a token, where it is not empty."""
    places = [] if token is None else (np.flatnonzero(values[start:stop] == token) + start).tolist()
    for first, last in zip([start, *(place + 1 for place in places)], [*places, stop], strict=True):
        if last > first:
            yield first, last
