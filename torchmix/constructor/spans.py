"""Where documents end in the tokens of a step: restarts of positions, spans of sources, cu_seqlens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.recipe.parts import Part
from torchmix.recipe.sources import sources_with_resets

# --- Ids inside a row that end a document: where they are, and how they cut the pieces.
#
# Packing stays as planned; a piece's padding belongs to its last part. Cost: 0.2 ns a token for each distinct id, a
# few numpy passes over pieces and resets, and nothing if no source resets.

NO_RESET = -1
"""Stands for the id of a source without `reset_id`."""


class CutPieces(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The n pieces of a replica, cut into p >= n contiguous parts, in memory order."""

    piece: Int64Array
    """[p] number of the piece, ascending."""
    start: Int64Array
    """[p] first token of the part among the replica's tokens, ascending."""
    tokens: Int64Array
    """[p] tokens, 1 or more."""
    padded_tokens: Int64Array
    """[p] tokens with padding."""


def find_resets(
    parts: Sequence[NDArray[np.integer[Any]]],
    start: Int64Array,
    tokens: Int64Array,
    id_of_piece: Int64Array,
) -> Int64Array:
    """Places of the ids that end a document, ascending.

    Args:
        parts: [N] token ids, in arrays that follow each other; anything in padding.
        start: [n] first token of each piece, ascending.
        tokens: [n] its tokens.
        id_of_piece: [n] id that ends a document in it, or NO_RESET.
    """
    found: list[Int64Array] = []
    for token in np.unique(id_of_piece[id_of_piece != NO_RESET]).tolist():
        first, of_parts = 0, [np.zeros(0, np.int64)]
        for values in parts:
            of_parts.append(np.flatnonzero(values == token) + first)
            first += len(values)
        places = np.concatenate(of_parts)
        piece = np.searchsorted(start, places, side="right") - 1
        is_inside = (piece >= 0) & (places < (start + tokens)[piece]) & (id_of_piece[piece] == token)
        found.append(places[is_inside])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *found]))


def cut_pieces(start: Int64Array, tokens: Int64Array, padded_tokens: Int64Array, resets: Int64Array) -> CutPieces:
    """Cut each piece after every reset in it that is not its last token.

    Args:
        start: [n] first token of each piece, ascending.
        tokens: [n] its tokens.
        padded_tokens: [n] the same with padding.
        resets: Places in pieces, ascending.
    """
    if not len(resets):
        return CutPieces(piece=np.arange(len(start)), start=start, tokens=tokens, padded_tokens=padded_tokens)
    stop = start + tokens
    piece = np.searchsorted(start, resets, side="right") - 1
    goes_on = resets + 1 < stop[piece]
    piece, cut = piece[goes_on], resets[goes_on] + 1
    piece_of_part = np.insert(np.arange(len(start)), piece + 1, piece)
    part_start = np.insert(start, piece + 1, cut)
    is_last = np.diff(piece_of_part, append=len(start)) > 0
    part_tokens = np.where(is_last, stop[piece_of_part], np.append(part_start[1:], 0)) - part_start
    padding = np.where(is_last, (padded_tokens - tokens)[piece_of_part], 0)
    return CutPieces(piece=piece_of_part, start=part_start, tokens=part_tokens, padded_tokens=part_tokens + padding)


def reset_ids_of(part: Part, sources: Sequence[str]) -> Int64Array | None:
    """The `reset_id` of each source, as `build` takes them."""
    ids = sources_with_resets(part.sources)
    return np.array([ids.get(name, NO_RESET) for name in sources]) if ids else None


# --- Spans: where positions restart and sources change, in the tokens of a step or of a rank's slice of it.
#
#     start     first token of the span in its microbatch on the rank, from 0
#     position  position of that token
#     source    number of its source, sources sorted by name; PADDING in padding
#
# Spans of a microbatch begin at 0 and rise; none spans two microbatches. Cost: a few numpy passes over the spans,
# nothing per token.

PADDING = -1
"""Source number of padding."""


class Spans(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """K spans over the tokens of all microbatches, laid end to end."""

    start: Int64Array
    """[K] first token, from 0, ascending."""
    position: Int64Array
    """[K] position of the first token."""
    source: Int64Array
    """[K] number of the source, or PADDING."""

    def to_array(self, tokens_stop: Int64Array) -> tuple[Int32Array, Int64Array]:
        """The arrays of a step: int32 [K, 3] with starts relative to the microbatch, and int64 [M] where each ends.

        Args:
            tokens_stop: int64 [M] where the tokens of each microbatch end, ascending.
        """
        stop = np.searchsorted(self.start, tokens_stop)
        array = np.empty((len(self.start), 3), np.int32)
        first = np.concatenate([np.zeros(1, np.int64), tokens_stop[:-1]])
        array[:, 0] = self.start - np.repeat(first, np.diff(stop, prepend=0))
        array[:, 1] = self.position
        array[:, 2] = self.source
        return array, stop

    @classmethod
    def from_array(cls, array: Int32Array, stop: Int64Array, tokens_of_microbatch: int) -> Spans:
        """The inverse of `to_array`."""
        microbatch = np.repeat(np.arange(len(stop)), np.diff(stop, prepend=0))
        start, position, source = array.astype(np.int64).T
        return cls(start=start + microbatch * tokens_of_microbatch, position=position, source=source)


def spans_of_pieces(
    start: Int64Array,
    tokens: Int64Array,
    position: Int64Array,
    source: NDArray[np.integer],
    *,
    tokens_stop: Int64Array,
) -> Spans:
    """One span for each piece or part of a piece, and one for each gap between them.

    Args:
        start: [n] first token of each piece or part, with all microbatches end to end, ascending.
        tokens: [n] tokens of each piece or part, 1 or more.
        position: [n] position of its first token.
        source: [n] number of its source.
        tokens_stop: [M] where the tokens of each microbatch end, padding included; ascending.
    """
    stop = start + tokens
    num_tokens = int(tokens_stop[-1])
    gap_start, gap_stop = np.zeros((2, len(start) + 1), np.int64)
    gap_start[1:] = stop
    gap_stop[:-1] = start
    gap_stop[-1] = num_tokens
    gap_tokens = gap_stop - gap_start
    assert gap_tokens.min() >= 0, "pieces do not overlap"
    with_gap = gap_tokens.nonzero()[0]
    of_gap = with_gap + np.arange(len(with_gap))
    of_piece = np.arange(len(start)) + (gap_tokens > 0).cumsum()[:-1]
    starts, positions, sources = np.zeros((3, len(start) + len(with_gap)), np.int64)
    starts[of_piece], starts[of_gap] = start, gap_start[with_gap]
    positions[of_piece] = position
    sources[of_piece], sources[of_gap] = source, PADDING
    spans = Spans(start=starts, position=positions, source=sources)
    # Padding may run from the end of one microbatch into the next, where a sample has no piece.
    borders = np.concatenate([np.zeros(1, np.int64), tokens_stop[:-1]])
    place = starts.searchsorted(borders)
    is_cut = (starts.take(place, mode="clip") != borders).nonzero()[0]
    if not len(is_cut):
        return spans
    assert (spans.source[place[is_cut] - 1] == PADDING).all(), "no piece spans two microbatches"
    return Spans(
        start=np.insert(spans.start, place[is_cut], borders[is_cut]),
        position=np.insert(spans.position, place[is_cut], 0),
        source=np.insert(spans.source, place[is_cut], PADDING),
    )


def slice_spans(
    spans: Spans, *, chunk_start: Int64Array, chunk_tokens: Int64Array, chunk_start_in_slice: Int64Array
) -> Spans:
    """The spans of a slice, which consists of chunks of the whole laid end to end.

    Args:
        spans: Spans of the whole.
        chunk_start: [c] first token of each chunk in the whole, ascending.
        chunk_tokens: [c] its tokens, 1 or more.
        chunk_start_in_slice: [c] its first token in the slice.
    """
    first = np.searchsorted(spans.start, chunk_start, side="right") - 1
    count = np.searchsorted(spans.start, chunk_start + chunk_tokens) - first
    before = np.cumsum(count) - count
    chosen = np.arange(count.sum()) + np.repeat(first - before, count)
    whole_start, source = spans.start[chosen], spans.source[chosen]
    start = np.maximum(whole_start, np.repeat(chunk_start, count))
    advance = np.where(source == PADDING, 0, start - whole_start)
    return Spans(
        start=start - np.repeat(chunk_start - chunk_start_in_slice, count),
        position=spans.position[chosen] + advance,
        source=source,
    )


# --- Where attention must stop: cu_seqlens and cu_seqlens_padded of every microbatch of a replica's step.
#
# The padded lengths of a sample's segments sum to its length, so padded boundaries also mark where a sample ends, and
# a segment never spans two samples. Cost: a few numpy passes over the pieces.


class Boundaries(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The boundaries of M microbatches, end to end."""

    cu_seqlens: Int32Array
    """[stop[-1]] true lengths, summed up from 0 in each microbatch."""
    cu_seqlens_padded: Int32Array
    """[stop[-1]] lengths with padding, summed up from 0 in each microbatch."""
    stop: Int64Array
    """[M] where each microbatch's part of the two arrays ends."""
    max_seqlen: Int32Array
    """[M] longest padded segment: rotary tables must cover it, and it bounds every true length."""


def boundaries_of_samples(num_samples: int, *, length: int, micro_batch_size: int) -> Boundaries:
    """One segment per sample, all of `length` tokens.

    Args:
        num_samples: Samples of the replica, a multiple of micro_batch_size.
        length: Tokens of a sample.
        micro_batch_size: Samples of a microbatch.
    """
    num_microbatches = num_samples // micro_batch_size
    entries = np.full(num_microbatches, micro_batch_size + 1, np.int64)
    lengths = np.full(num_samples + num_microbatches, length, np.int64)
    lengths[:: micro_batch_size + 1] = 0
    return sum_up(lengths, lengths, entries)


def boundaries_of_documents(
    sample: Int64Array,
    tokens: Int64Array,
    padded_tokens: Int64Array,
    *,
    num_samples: int,
    length: int,
    micro_batch_size: int,
) -> Boundaries:
    """One segment per piece or part of a piece, and one segment of true length 0 for the padding after them.

    Args:
        sample: [n] sample of each piece, in [0, num_samples), ascending.
        tokens: [n] tokens of each piece, 1 or more.
        padded_tokens: [n] tokens of each piece with its padding.
        num_samples: Samples of the replica, a multiple of micro_batch_size.
        length: Tokens of a sample.
        micro_batch_size: Samples of a microbatch.
    """
    pieces_of_sample = np.bincount(sample, minlength=num_samples)
    pieces_stop = pieces_of_sample.cumsum()
    padded_stop = np.zeros(len(tokens) + 1, np.int64)
    padded_tokens.cumsum(out=padded_stop[1:])
    tail_tokens = length - (padded_stop[pieces_stop] - padded_stop[pieces_stop - pieces_of_sample])
    assert tail_tokens.min() >= 0, "aligned pieces fit their sample"
    # A tail follows the last piece of each sample that has one, and an entry of 0 begins each microbatch.
    has_tail = tail_tokens > 0
    with_tail = has_tail.nonzero()[0]
    entries_before = has_tail.cumsum() - has_tail + np.arange(num_samples) // micro_batch_size + 1
    entry_of_piece = np.arange(len(tokens)) + entries_before[sample]
    entry_of_tail = (pieces_stop + entries_before)[with_tail]
    entries = (pieces_of_sample + has_tail).reshape(-1, micro_batch_size).sum(axis=1) + 1
    true_lengths, padded_lengths = np.zeros((2, int(entries.sum())), np.int64)
    true_lengths[entry_of_piece] = tokens
    padded_lengths[entry_of_piece] = padded_tokens
    padded_lengths[entry_of_tail] = tail_tokens[with_tail]
    return sum_up(true_lengths, padded_lengths, entries)


def sum_up(true_lengths: Int64Array, padded_lengths: Int64Array, entries: Int64Array) -> Boundaries:
    """Cumulative lengths, which restart from 0 at each microbatch; the first of its entries is of no tokens."""
    stop = entries.cumsum()
    first = stop - entries
    cumulative = []
    for lengths in (true_lengths, padded_lengths):
        total = lengths.cumsum()
        cumulative.append((total - total[first].repeat(entries)).astype(np.int32))
    max_seqlen = np.maximum.reduceat(padded_lengths, first).astype(np.int32)
    return Boundaries(cu_seqlens=cumulative[0], cu_seqlens_padded=cumulative[1], stop=stop, max_seqlen=max_seqlen)
