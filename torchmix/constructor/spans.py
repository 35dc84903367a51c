"""Spans: where positions restart and sources change, in the tokens of a step or of a rank's slice of it.

In: the pieces of a replica's samples, in order; for a rank under context parallelism, the chunks that it takes. Out:
spans that cover every token, including padding. The tokens of a span are consecutive, belong to one source, and their
positions count up by one. In a span of padding the source is PADDING and every position is 0.

    start     first token of the span in its microbatch on the rank, from 0
    position  position of that token
    source    number of its source, sources sorted by name; PADDING in padding

Must hold: spans of a microbatch begin at 0 and rise; none spans two microbatches. Cost: a few numpy passes over the
spans, nothing per token.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array

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

    def to_array(self, num_microbatches: int, tokens_of_microbatch: int) -> tuple[Int32Array, Int64Array]:
        """The arrays of a step: int32 [K, 3] with starts relative to the microbatch, and int64 [M] where each ends."""
        borders = np.arange(1, num_microbatches + 1) * tokens_of_microbatch
        stop = np.searchsorted(self.start, borders)
        array = np.empty((len(self.start), 3), np.int32)
        array[:, 0] = self.start % tokens_of_microbatch
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
    num_microbatches: int,
    tokens_of_microbatch: int,
) -> Spans:
    """One span for each piece or part of a piece, and one for each gap between them.

    Args:
        start: [n] first token of each piece or part, with all microbatches end to end, ascending.
        tokens: [n] tokens of each piece or part, 1 or more.
        position: [n] position of its first token.
        source: [n] number of its source.
        num_microbatches: M.
        tokens_of_microbatch: Tokens of each microbatch, with padding.
    """
    stop = start + tokens
    num_tokens = num_microbatches * tokens_of_microbatch
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
    borders = np.arange(num_microbatches) * tokens_of_microbatch
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
