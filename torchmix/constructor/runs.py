"""Runs of ranks -> what each rank of a replica has of its bins: chunks of documents, and where they lie.

With `packing: {method: whole}` a microbatch of a rank is its slice of a bin. Each document of the bin is cut into twice
as many equal chunks as the run has ranks, padding included, and a rank takes an early and a late one, as context
parallelism of one size does. Ranks of one replica may be of different runs, so their slices lie end to end, each of its
own length: by CP slice, then by microbatch. A leader reads the chunks of its own ranks and no more of a bin.

Cost: a few numpy passes over the chunks, which are at most two for each document and rank of its run.
"""

from __future__ import annotations

import msgspec
import numpy as np

from torchmix.array_types import Int32Array, Int64Array
from torchmix.constructor.spans import Boundaries, sum_up
from torchmix.planner.plan import StepPlan


class RunSlices(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The slices of a replica's ranks in a step, R = cp x microbatches of them, by CP slice, then microbatch."""

    num_microbatches: int
    tokens_stop: Int64Array
    """[R] where the tokens of each slice end among those of all; each has one or more."""
    run: Int32Array
    """[R, 2] first rank and ranks of the run that shares the bin; ranks count replicas, then CP slices."""
    boundaries: Boundaries
    """[R] of the whole bins, so ranks of one bin have equal ones."""
    position: Int64Array
    """[n] first token of each chunk in its document's piece."""


class Chunks(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The n chunks of a replica's slices that have a token, in the order in which they lie."""

    slices: RunSlices
    slice_of_chunk: Int64Array
    """[n] in [0, R), ascending."""
    offset: Int64Array
    """[n] first token of each in its slice."""
    piece: Int64Array
    """[n] number of its piece in the plan."""
    tokens: Int64Array
    """[n] without padding, 1 or more."""


def chunks_of_replica(plan: StepPlan, replica: int) -> Chunks:
    """What the ranks of a replica have of a step.

    Args:
        plan: A plan of `whole`: each piece is a sample, and has a bin.
        replica: Data-parallel rank, in [0, plan.layout.dp).

    Source: the zigzag of Megatron-LM's `get_batch_on_this_cp_rank`, by document as Transformer Engine's
    `thd_get_partitioned_indices` cuts them.
    """
    contexts, cp = plan.contexts, plan.layout.cp
    assert contexts is not None, "of a plan with runs"
    num_bins, num_ranks = len(contexts.size_of_bin), plan.layout.dp * cp
    bin_of_rank = np.repeat(np.arange(num_bins), contexts.size_of_bin).reshape(-1, num_ranks)
    ranks = np.arange(replica * cp, (replica + 1) * cp)
    bin_of_slice = bin_of_rank[:, ranks].T.ravel()
    size, first = contexts.size_of_bin[bin_of_slice], contexts.first_rank_of_bin[bin_of_slice]
    index = np.repeat(ranks, len(bin_of_rank)) - first

    # The samples of each slice's bin, which come one after the other.
    samples = np.argsort(contexts.bin_of_sample, kind="stable")
    count_of_bin = np.bincount(contexts.bin_of_sample, minlength=num_bins)
    first_of_bin = np.cumsum(count_of_bin) - count_of_bin
    count = count_of_bin[bin_of_slice]
    before = np.cumsum(count) - count
    sample = samples[np.arange(count.sum()) + np.repeat(first_of_bin[bin_of_slice] - before, count)]
    owner = np.repeat(np.arange(len(count)), count)
    tokens, padded = plan.pieces.tokens[sample], contexts.padded_tokens[sample]

    # A rank alone has one chunk, the whole document; each other one has an early and a late chunk.
    ways, at = size[owner], index[owner]
    chunk = padded // np.where(ways > 1, 2 * ways, 1)
    start = np.stack([at * chunk, (2 * ways - 1 - at) * chunk], axis=1)
    length = np.stack([chunk, np.where(ways > 1, chunk, 0)], axis=1)
    has = np.clip(tokens[:, None] - start, 0, length)
    tokens_of_slice = np.bincount(owner, weights=length.sum(axis=1), minlength=len(size)).astype(np.int64)
    is_empty = count == 0
    tokens_of_slice[is_empty] = contexts.align * np.where(size[is_empty] > 1, 2, 1)
    tokens_stop = np.cumsum(tokens_of_slice)
    # Within a slice chunks lie end to end with their padding.
    flat = length.ravel()
    place = np.cumsum(flat) - flat
    slice_of_flat = np.repeat(owner, 2)
    of_documents = np.where(is_empty, 0, tokens_of_slice)
    offset = place - (np.cumsum(of_documents) - of_documents)[slice_of_flat]
    chosen = np.flatnonzero(has.ravel())
    slices = RunSlices(
        num_microbatches=contexts.num_microbatches,
        tokens_stop=tokens_stop,
        run=np.stack([first, size], axis=1).astype(np.int32),
        boundaries=_boundaries(count, tokens, padded, (tokens_of_slice * size)[is_empty]),
        position=start.ravel()[chosen],
    )
    return Chunks(
        slices=slices,
        slice_of_chunk=slice_of_flat[chosen],
        offset=offset[chosen],
        piece=np.repeat(sample, 2)[chosen],
        tokens=has.ravel()[chosen],
    )


def _boundaries(count: Int64Array, tokens: Int64Array, padded: Int64Array, of_empty: Int64Array) -> Boundaries:
    """One segment for each document of each slice's bin; one of true length 0 where it has none.

    Args:
        count: [R] documents of each bin.
        tokens: [k] of all documents, slice by slice.
        padded: [k] with padding.
        of_empty: Tokens of each bin without a document.
    """
    entries = np.maximum(count, 1) + 1
    first = np.cumsum(entries) - entries
    true_lengths, padded_lengths = np.zeros((2, int(entries.sum())), np.int64)
    owner = np.repeat(np.arange(len(count)), count)
    place = first[owner] + 1 + np.arange(len(tokens)) - (np.cumsum(count) - count)[owner]
    true_lengths[place], padded_lengths[place] = tokens, padded
    padded_lengths[first[count == 0] + 1] = of_empty
    return sum_up(true_lengths, padded_lengths, entries)
