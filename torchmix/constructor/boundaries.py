"""Where attention must stop: cu_seqlens and cu_seqlens_padded of every microbatch of a replica's step.

In: the pieces of the replica's samples, in order. Out: both arrays for all microbatches end to end, as Megatron and
Transformer Engine read them: cumulative, from 0, over the tokens of a microbatch, sample after sample. `fields.py`
defines their meaning.

Must hold: the padded lengths of a sample's segments sum to its length, so padded boundaries also mark where a sample
ends, and a segment never spans two samples. Cost: a few numpy passes over the pieces.
"""

from __future__ import annotations

import msgspec
import numpy as np

from torchmix.array_types import Int32Array, Int64Array


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
    return _sum_up(lengths, lengths, entries)


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
    return _sum_up(true_lengths, padded_lengths, entries)


def _sum_up(true_lengths: Int64Array, padded_lengths: Int64Array, entries: Int64Array) -> Boundaries:
    """Cumulative lengths, which restart from 0 at each microbatch; the first of its entries is of no tokens."""
    stop = entries.cumsum()
    first = stop - entries
    cumulative = []
    for lengths in (true_lengths, padded_lengths):
        total = lengths.cumsum()
        cumulative.append((total - total[first].repeat(entries)).astype(np.int32))
    max_seqlen = np.maximum.reduceat(padded_lengths, first).astype(np.int32)
    return Boundaries(cu_seqlens=cumulative[0], cu_seqlens_padded=cumulative[1], stop=stop, max_seqlen=max_seqlen)
