"""Pieces -> samples of fixed capacity, over the whole global batch.

Every piece is placed once or deferred once; no sample exceeds its capacity in aligned tokens; one step empties a pool
of at most half a batch (older pieces go first). Cost: `best_fit` about a microsecond a piece, `concat` less.

Why the pool stays small: best fit opens an empty sample only if the piece fits no used sample. So any two used samples
together hold more than one sample's capacity. If a piece is deferred, all samples are used. A batch of two or more
samples then delivers more than half its capacity. `whole` delivers C or more of the W tokens at hand, the first drawn
first. Whatever comes later is behind them, so all of W is delivered within ceil(W / C) steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.mixture.keys import hash_columns, keyed_order, named_key, order_by

MAX_CLASS = 3
"""Pieces deferred this many times or more form one class, which goes first."""


NOT_LOOKED_UP: Int64Array = np.zeros(0, np.int64)


class Pieces(msgspec.Struct, frozen=True, kw_only=True, eq=False, omit_defaults=True, forbid_unknown_fields=True):
    """Parts of documents that fit a sample. All arrays int64 [n]."""

    stream: Int64Array
    """Index of the stream that gave it, by sorted name."""
    source: Int64Array
    """Index of the source that it lies in, by sorted name."""
    epoch: Int64Array
    """Epoch of the stream."""
    row: Int64Array
    """Row of the source."""
    start: Int64Array
    """First token of the piece in its document."""
    tokens: Int64Array
    drawn_step: Int64Array
    document_tokens: Int64Array = NOT_LOOKED_UP
    """Length of the whole document in the catalog; of pieces that a state holds a planner looks them up."""

    def __len__(self) -> int:
        return len(self.row)

    def take(self, order: Int64Array | NDArray[np.bool_]) -> Pieces:
        """The pieces at `order` (positions or a mask)."""
        return Pieces(**{name: getattr(self, name)[order] for name in _COLUMNS})

    @staticmethod
    def concatenate(parts: list[Pieces]) -> Pieces:
        """All pieces of `parts`, in order."""
        return Pieces(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS})

    @staticmethod
    def empty() -> Pieces:
        """No pieces."""
        return Pieces(**{name: np.zeros(0, np.int64) for name in _COLUMNS})


_COLUMNS = Pieces.__struct_fields__


class Packed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The samples of a step: pieces sorted by (sample, slot), and the remaining pool."""

    pieces: Pieces
    sample: Int64Array
    """[n] in [0, num_samples)."""
    slot: Int64Array
    """[n] index of the piece in its sample, from 0."""
    sample_offset: Int64Array
    """[n] first token of the piece in its sample, a multiple of `align_tokens`."""
    pool: Pieces


def split_long(pieces: Pieces, cuts: Int64Array) -> Pieces:
    """Cut each stretch where a multiple of `cuts` tokens of its document ends, in order.

    Args:
        pieces: Stretches.
        cuts: int64 [n] for each of them; 0: it is not cut here.
    """
    # Edges are multiples in the document, not in the stretch: a piece is the same wherever draws stopped.
    stop = pieces.start + pieces.tokens
    size = np.where(cuts > 0, cuts, np.maximum(stop, 1))
    first = np.where(cuts > 0, pieces.start // size, 0)
    parts = np.where(cuts > 0, -(-stop // size) - first, 1)
    if not len(parts) or parts.max() == 1:
        return pieces
    owner = np.repeat(np.arange(len(pieces)), parts)
    part = np.arange(int(parts.sum()), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
    cut, edge = pieces.take(owner), (first[owner] + part) * size[owner]
    begin = np.maximum(cut.start, edge)
    end = np.minimum(stop[owner], edge + size[owner])
    return replace(cut, start=begin, tokens=end - begin)


def aligned(tokens: Int64Array, align_tokens: int) -> Int64Array:
    """Lengths rounded up to a multiple of `align_tokens`."""
    return -(-tokens // align_tokens) * align_tokens


def concat(pool: Pieces, new: Pieces, tie: NDArray[np.uint64], *, num_samples: int, length: int) -> Packed:
    """Lay pool and new stretches end to end and cut every `length` tokens.

    Args:
        pool: Pieces that the previous step left, in order.
        new: Stretches drawn in this step; `tie` decides their order.
        tie: uint64 [len(new)] a hash of each stretch.
        num_samples, length: Samples of the global batch, and tokens per sample. Padding at the end fills what the
            pieces leave; only the last step of a single pass has any.
    """
    stream = Pieces.concatenate([pool, new.take(order_by(np.zeros_like(tie), tie, major_bits=0))])
    stops = np.cumsum(stream.tokens)
    starts = stops - stream.tokens
    capacity = num_samples * length
    # A piece is cut wherever a sample ends inside it; the batch's end cuts the pool off.
    cuts = np.arange(1, num_samples + 1, dtype=np.int64) * length
    ends = np.union1d(stops, cuts[cuts < stops[-1]])  # where parts end, in tokens from the first stretch on
    owner = np.searchsorted(stops, ends)  # the piece that ends at or holds each cut
    part_start = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    parts = stream.take(owner)
    parts = replace(parts, start=parts.start + part_start - starts[owner], tokens=ends - part_start)
    inside = int(np.searchsorted(ends, capacity, side="right"))  # parts of this batch; no part reaches over its end
    sample = part_start[:inside] // length
    first = np.searchsorted(sample, np.arange(num_samples))
    # Deferred stretches stay whole: only the stretch that the batch's end cuts has given a part already.
    rest = int(np.searchsorted(stops, capacity, side="right"))
    given = np.maximum(capacity - starts[rest:], 0)
    left = stream.take(np.arange(rest, len(stream)))
    return Packed(
        pieces=parts.take(np.arange(inside)),
        sample=sample,
        slot=np.arange(inside, dtype=np.int64) - first[sample],
        sample_offset=part_start[:inside] % length,
        pool=replace(left, start=left.start + given, tokens=left.tokens - given),
    )


def pad(pieces: Pieces) -> Packed:
    """A sample for each piece, in their order; nothing is deferred."""
    count = len(pieces)
    zeros = np.zeros(count, np.int64)
    return Packed(
        pieces=pieces,
        sample=np.arange(count, dtype=np.int64),
        slot=zeros,
        sample_offset=zeros,
        pool=Pieces.empty(),
    )


def whole(pieces: Pieces, tie: NDArray[np.uint64], *, capacity_tokens: int, seed: int, step: int) -> Packed:
    """A sample of its own length for each piece of the shortest prefix that reaches the capacity; the rest waits.

    Args:
        pieces: Deferred pieces, in order; then those drawn in this step.
        tie: uint64 [len(pieces)] hash of each piece. What was drawn first comes first, of one step by hash.
        capacity_tokens: C. The samples have C tokens or more, and less than C and their last piece; those of all
            pieces where there are fewer.
        seed, step: Number the samples.
    """
    order = np.lexsort((np.arange(len(pieces)), tie, pieces.drawn_step))
    count = int(np.searchsorted(np.cumsum(pieces.tokens[order]), capacity_tokens)) + 1
    waits = np.ones(len(pieces), np.bool_)
    waits[order[:count]] = False
    packed = replace(pad(pieces.take(order[:count])), pool=pieces.take(waits))
    return renumber(packed, sample_numbers(seed=seed, step=step, num_samples=len(packed.pieces)))


def best_fit(
    pieces: Pieces,
    num_deferred: int,
    tie: NDArray[np.uint64],
    *,
    num_samples: int,
    length: int,
    align_tokens: int,
    step: int,
    number_of_sample: Int64Array | None = None,
) -> Packed:
    """Best-fit decreasing by age class: the longest piece first, each in the fitting sample with the least room.

    A hash chooses the pieces to hold back when there are more than the batch holds, before packing. Best fit alone
    would always defer the shortest documents.

    Args:
        pieces: Deferred pieces, in order; then those drawn in this step. None is longer than `length`.
        num_deferred: How many of them are deferred ones.
        tie: uint64 [len(pieces)] hash of each piece. It orders pieces of equal length, chooses the pieces to hold back,
            and orders the pieces inside a sample.
        num_samples, length: Samples of the global batch, and tokens per sample.
        align_tokens: Every piece takes a multiple of this many tokens; it divides `length`.
        step: The step being packed; a piece's age is `step - drawn_step`.
        number_of_sample: int64 [num_samples] numbers of the samples, from `sample_numbers`; None: as they are opened.

    Source: best-fit decreasing, Johnson 1973.
    """
    units = -(-pieces.tokens // align_tokens)  # all that follows counts units, of `align_tokens` each
    sample = _fitted(
        units,
        num_deferred,
        tie,
        ages=step - pieces.drawn_step,
        num_samples=num_samples,
        capacity=length // align_tokens,
        number_of_sample=number_of_sample,
    )
    pool = pieces.take(sample < 0)
    return _in_samples(pieces, units, sample, tie, pool=pool, num_samples=num_samples, align=align_tokens)


def fill(
    pieces: Pieces,
    is_cut: NDArray[np.bool_],
    num_deferred: int,
    tie: NDArray[np.uint64],
    *,
    hashes: Callable[[Pieces], NDArray[np.uint64]],
    num_samples: int,
    length: int,
    align_tokens: int,
    step: int,
    number_of_sample: Int64Array,
) -> Packed:
    """Best fit of some pieces, as if they were alone; then the others flow into what these leave, cut where it ends.

    So a sample has padding only where a piece ends within a unit, or where nothing is left to flow: all pieces at hand
    fill the batch or more. Whoever is cut goes on in the next sample, and at the end of the batch in the pool, in
    order, so the pool is as small as that of `best_fit`.

    Args:
        pieces: Deferred pieces, in order; then those drawn in this step. Whole ones are not longer than `length`.
        is_cut: bool [len(pieces)] whether a piece may be cut anywhere.
        hashes: uint64 [n] of n parts of pieces, as `tie` is of the pieces.
        num_deferred, tie, num_samples, length, align_tokens, step, number_of_sample: As of `best_fit`. The parts flow
            through the samples by number, deferred pieces first, then new ones by hash; a new one that goes on where a
            deferred one ends is part of that, so no sample has two parts of a document in an epoch.
    """
    units = -(-pieces.tokens // align_tokens)
    whole, cut = (~is_cut).nonzero()[0], is_cut.nonzero()[0]
    num_whole, num_cut = (int(np.count_nonzero(of < num_deferred)) for of in (whole, cut))
    capacity = length // align_tokens
    sample = _fitted(
        units[whole],
        num_whole,
        tie[whole],
        ages=step - pieces.drawn_step[whole],
        num_samples=num_samples,
        capacity=capacity,
        number_of_sample=number_of_sample,
    )
    placed = sample >= 0
    gaps = capacity - np.bincount(sample[placed], units[whole[placed]], num_samples).astype(np.int64)
    waiting, is_alone = _with_what_goes_on(pieces.take(cut[:num_cut]), pieces.take(cut[num_cut:]))
    new = cut[num_cut:][is_alone]
    new = new[order_by(np.zeros_like(tie[new]), tie[new], major_bits=0)]
    parts, sample_of_part, rest = _flow(Pieces.concatenate([waiting, pieces.take(new)]), gaps, align_tokens)
    return _in_samples(
        Pieces.concatenate([pieces.take(whole), parts]),
        np.concatenate([units[whole], -(-parts.tokens // align_tokens)]),
        np.concatenate([sample, sample_of_part]),
        np.concatenate([tie[whole], hashes(parts)]),
        pool=Pieces.concatenate([pieces.take(whole[~placed]), rest]),
        num_samples=num_samples,
        align=align_tokens,
    )


def _with_what_goes_on(waiting: Pieces, new: Pieces) -> tuple[Pieces, NDArray[np.bool_]]:
    """Deferred pieces, each with the new one that goes on where it ends; bool [len(new)] which new ones are left."""
    is_alone, tokens = np.ones(len(new), np.bool_), waiting.tokens.copy()
    begun = np.flatnonzero(new.start)  # a document is begun in one step alone, so these are few
    if not len(begun):
        return waiting, is_alone
    ends = [*zip(*(each.tolist() for each in (*_documents(waiting), waiting.start + waiting.tokens)), strict=True)]
    at = {end: number for number, end in enumerate(ends)}
    for number, *begins in zip(begun.tolist(), *(each[begun].tolist() for each in _documents(new)), strict=True):
        before = at.get((*begins, int(new.start[number])))
        if before is not None:
            tokens[before] += new.tokens[number]
            is_alone[number] = False
    return replace(waiting, tokens=tokens), is_alone


def _documents(pieces: Pieces) -> tuple[Int64Array, ...]:
    """What tells the documents of pieces apart."""
    return pieces.stream, pieces.source, pieces.epoch, pieces.row


def _flow(stream: Pieces, gaps: Int64Array, align_tokens: int) -> tuple[Pieces, Int64Array, Pieces]:
    """Pieces laid end to end through gaps of so many units: the parts, the gap of each, and what is left over."""
    units = -(-stream.tokens // align_tokens)
    stops, ends_of_gap = np.cumsum(units), np.cumsum(gaps)
    total = min(int(stops[-1]) if len(stops) else 0, int(ends_of_gap[-1]))
    # A part ends where its piece ends, or where a gap does.
    ends = np.union1d(stops[stops <= total], np.append(ends_of_gap[ends_of_gap <= total], total))
    ends = ends[ends > 0]
    starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
    owner = np.searchsorted(stops, ends)
    before = starts - (stops - units)[owner]  # units of the piece that earlier parts took
    parts = stream.take(owner)
    tokens = np.minimum(parts.tokens - before * align_tokens, (ends - starts) * align_tokens)
    parts = replace(parts, start=parts.start + before * align_tokens, tokens=tokens)
    first = int(np.searchsorted(stops, total, side="right"))
    left = stream.take(np.arange(first, len(stream)))
    given = np.maximum(total - (stops - units)[first:], 0) * align_tokens
    left = replace(left, start=left.start + given, tokens=left.tokens - given)
    return parts, np.searchsorted(ends_of_gap, starts, side="right"), left


def _fitted(
    units: Int64Array,
    num_deferred: int,
    tie: NDArray[np.uint64],
    *,
    ages: Int64Array,
    num_samples: int,
    capacity: int,
    number_of_sample: Int64Array | None,
) -> Int64Array:
    """int64 [n] sample of each piece by best fit; -1: it waits."""
    is_ready = np.ones(len(units), np.bool_)
    held = _held_back(units[num_deferred:], tie[num_deferred:], int(units.sum()) - num_samples * capacity)
    is_ready[num_deferred + held] = False
    ready = is_ready.nonzero()[0]
    # Class 0 waits longest and goes first. Sorted by (class, longest, hash), as one integer and its tie.
    age_class = MAX_CLASS - np.minimum(ages[ready], MAX_CLASS)
    unit_bits = capacity.bit_length()
    major = ((age_class << unit_bits) | (capacity - units[ready])).astype(np.uint64)
    ready = ready[order_by(major, tie[ready], major_bits=2 + unit_bits)]  # 2 bits hold the classes 0 to MAX_CLASS
    sample_of_ready = _best_samples(units[ready], num_samples, capacity)
    if number_of_sample is not None:
        sample_of_ready = np.where(sample_of_ready < 0, -1, number_of_sample[sample_of_ready])
    sample = np.full(len(units), -1, np.int64)
    sample[ready] = sample_of_ready
    return sample


def _in_samples(
    pieces: Pieces,
    units: Int64Array,
    sample_of_piece: Int64Array,
    tie: NDArray[np.uint64],
    *,
    pool: Pieces,
    num_samples: int,
    align: int,
) -> Packed:
    """The pieces that have a sample, by sample, and by hash within: else every sample would begin with its longest."""
    placed = (sample_of_piece >= 0).nonzero()[0]
    major = sample_of_piece[placed].astype(np.uint64)
    placed = placed[order_by(major, tie[placed], major_bits=max(1, (num_samples - 1).bit_length()))]
    sample, units_placed = sample_of_piece[placed], units[placed]
    before = units_placed.cumsum() - units_placed
    first = sample.searchsorted(sample)  # samples ascend: [n] the first piece of each piece's own sample
    return Packed(
        pieces=pieces.take(placed),
        sample=sample,
        slot=np.arange(len(placed), dtype=np.int64) - first,
        sample_offset=(before - before[first]) * align,
        pool=pool,
    )


def _held_back(units: Int64Array, tie: NDArray[np.uint64], surplus: int) -> Int64Array:
    """The new pieces to hold back: the first by hash whose sum is at most the surplus."""
    if surplus <= 0 or not len(units):
        return np.zeros(0, np.int64)
    order = order_by(tie, tie, major_bits=0)
    return order[: int(units[order].cumsum().searchsorted(surplus, side="right"))]


def _best_samples(units: Int64Array, num_samples: int, capacity: int) -> Int64Array:
    """Sample of each item, -1 if none has room: of those in use the one with the least room that fits, or a new one.

    The lowest number wins among samples with equal room.
    """
    found: list[int] = []
    bits = num_samples.bit_length()
    # room << bits | sample, sorted: a bisection for `length << bits` finds the least room that fits, and of equal rooms
    # the lowest number. Full samples are not in it.
    used: list[int] = []
    opened = 0
    for length in units.tolist():
        at = bisect_left(used, length << bits)
        if at < len(used):
            best = used.pop(at)
            room, sample = best >> bits, best & ~(-1 << bits)
        elif opened < num_samples:  # no used sample fits
            room, sample = capacity, opened
            opened += 1
        else:
            found.append(-1)
            continue
        found.append(sample)
        if room > length:
            insort(used, room - length << bits | sample)
    return np.array(found, np.int64)


def piece_hashes(seed: int, step: int, name_hash: NDArray[np.uint64], pieces: Pieces) -> NDArray[np.uint64]:
    """uint64 [n] hash of each piece in this step; `name_hash` [n] is that of its stream and source."""
    key = named_key(seed, "pack", step)
    return hash_columns(key, name_hash, pieces.epoch, pieces.row, pieces.start)


def sample_numbers(*, seed: int, step: int, num_samples: int) -> Int64Array:
    """int64 [num_samples] number of each sample by a hash, however they were packed (best fit emits them by length)."""
    number_of_sample = np.empty(num_samples, np.int64)
    number_of_sample[keyed_order(named_key(seed, "samples", step), num_samples)] = np.arange(num_samples)
    return number_of_sample


def renumber(packed: Packed, number_of_sample: Int64Array) -> Packed:
    """Number the samples otherwise, by `sample_numbers`."""
    sample = number_of_sample[packed.sample]
    order = np.argsort(sample, kind="stable")
    return Packed(
        pieces=packed.pieces.take(order),
        sample=sample[order],
        slot=packed.slot[order],
        sample_offset=packed.sample_offset[order],
        pool=packed.pool,
    )
