"""The share of each role: the fields that its stage needs, and its zigzag slice of the sequence.

In: `StepTensors` at full length. Out: `StepTensors` of one role, at length / cp.

With cp ranks, a stretch of tokens is cut into 2 * cp equal chunks. Rank r takes chunks r and 2 * cp - 1 - r: one early
and one late, so that all ranks have the same work under a causal mask. Where documents are aligned (`best_fit` with
`boundaries: document`) a stretch is a segment of cu_seqlens_padded, and a sample's tail of padding is one too.
Otherwise a stretch is a whole sample. cu_seqlens and its companions stay whole, as Transformer Engine and Megatron
expect them.

Must hold: the slices of all cp ranks partition the tokens, and each sample gives each rank length / cp tokens, in
order. Cost: nothing for cp = 1, which shares memory; otherwise 3.5 to 7 ns per token of a rank, ids and labels
together, for pieces of 800 and of 60 tokens on average.

Sources: Megatron-LM `get_batch_on_this_cp_rank` (whole samples); Transformer Engine `thd_get_partitioned_indices`
(packed documents, by cu_seqlens_padded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from torchmix.array_types import Int64Array
from torchmix.constructor.fields import StepTensors
from torchmix.constructor.memory import StepMemory
from torchmix.constructor.modules.routes import slice_align
from torchmix.constructor.ramps import fill_ramps
from torchmix.constructor.spans import Spans, slice_spans
from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import Role
from torchmix.recipe.structs import Packing


class CpSlices(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens of a step that each CP rank takes, as c chunks. Computed once a step; empty arrays for cp = 1."""

    cp: int
    """Context-parallel ranks."""
    chunk_tokens: Int64Array
    """[c] tokens of each chunk."""
    chunk_start_in_slice: Int64Array
    """[c] first token of each chunk in a rank's slice, ascending."""
    chunk_start_of_rank: Int64Array
    """[cp, c] first token of each chunk in the step."""


def check_context_parallel(cp: int, *, length: int, packing: Packing, resetting: Sequence[str] = ()) -> None:
    """Refuse sizes that do not divide every stretch into 2 * cp equal chunks.

    Args:
        cp: Context-parallel ranks.
        length: Tokens of a sample.
        packing: The recipe's packing.
        resetting: Names of sources with a `reset_id`.

    Raises:
        TopologyError: `length` is no multiple of 2 * cp. Or each document is cut, and `align_tokens` is no multiple of
            2 * cp, or a `reset_id` ends documents at places that the plan does not know.
    """
    if cp == 1:
        return
    chunks = 2 * cp
    if length % chunks:
        raise TopologyError(
            f"context parallelism of cp={cp} cuts a sample into {chunks} equal chunks, but batch.length is {length}; "
            f"set length: {math.ceil(length / chunks) * chunks}, or choose a cp of which the double divides {length}"
        )
    if _slices_documents(packing) and resetting:
        raise TopologyError(
            f"context parallelism of cp={cp} cuts each document into {chunks} equal chunks, but documents of "
            f"{', '.join(resetting)} also end at each reset_id inside a row, where nothing is aligned; give each text "
            f"a row of its own, remove reset_id, write packing.boundaries: none, or use cp=1"
        )
    if _slices_documents(packing) and packing.align_tokens % chunks:
        raise TopologyError(
            f"context parallelism of cp={cp} cuts each document into {chunks} equal chunks, but packing.align_tokens "
            f"is {packing.align_tokens}; set align_tokens: {math.lcm(packing.align_tokens, chunks)} (it alters the "
            f"order of the data), or choose a cp of which the double divides {packing.align_tokens}"
        )


def cp_slices(tensors: StepTensors, cp: int, *, length: int, packing: Packing) -> CpSlices:
    """Slice all stretches of a step.

    Args:
        tensors: A step from `build`.
        cp: Context-parallel ranks.
        length: Tokens of a sample.
        packing: The recipe's packing, which decides whether documents or samples are stretches.

    Raises:
        TopologyError: As in `check_context_parallel`, which a loader calls before any data is read.
    """
    check_context_parallel(cp, length=length, packing=packing)
    if cp == 1:
        none = np.zeros(0, np.int64)
        return CpSlices(cp=1, chunk_tokens=none, chunk_start_in_slice=none, chunk_start_of_rank=none.reshape(1, 0))
    cu_seqlens, stop = tensors.cu_seqlens_padded.numpy().astype(np.int64), tensors.cu_seqlens_stop.numpy()
    if _slices_documents(packing):
        # The end of one microbatch and the 0 of the next one are neighbours, but they bound no stretch.
        stretch_tokens = np.delete(np.diff(cu_seqlens), stop[:-1] - 1)
    else:
        stretch_tokens = np.full(int(cu_seqlens[stop - 1].sum()) // length, length, np.int64)
    assert not (stretch_tokens % (2 * cp)).any(), "aligned documents and their tail divide into chunks"
    stretch_start = np.cumsum(stretch_tokens) - stretch_tokens
    chunk_tokens = stretch_tokens // (2 * cp)
    chunk_start_in_slice = np.repeat(stretch_start // cp, 2)
    chunk_start_in_slice[1::2] += chunk_tokens
    cp_rank = np.arange(cp)[:, None]
    early, late = (stretch_start + chunk * chunk_tokens for chunk in (cp_rank, 2 * cp - 1 - cp_rank))
    return CpSlices(
        cp=cp,
        chunk_tokens=np.repeat(chunk_tokens, 2),
        chunk_start_in_slice=chunk_start_in_slice,
        chunk_start_of_rank=np.stack([early, late], axis=2).reshape(cp, -1),
    )


def share_of(tensors: StepTensors, role: Role, slices: CpSlices, *, memory: StepMemory | None = None) -> StepTensors:
    """The share of a step that the ranks of one role get.

    First stages get tokens, last stages labels, a single stage both, middle stages neither. Spans, boundaries and
    header go to all.

    Args:
        tensors: A step from `build`, [M, B, length].
        role: The role; its cp_rank is in [0, slices.cp).
        slices: From `cp_slices` of the same step.
        memory: Lends memory to the slices; fresh memory if None.

    Returns:
        Tensors [M, B, length / cp]. With cp = 1 they share memory with `tensors`.
    """
    tokens = tensors.tokens if role.is_first_stage else None
    labels = tensors.labels if role.is_last_stage else None
    if slices.cp == 1:
        return replace(tensors, tokens=tokens, labels=labels)
    chunk_start = slices.chunk_start_of_rank[role.cp_rank]
    num_tokens = int(slices.chunk_tokens.sum())
    memory = memory or StepMemory()
    index = memory.empty(num_tokens, np.int64)
    if role.is_first_stage or role.is_last_stage:
        fill_ramps(slices.chunk_start_in_slice, chunk_start, slope=1, out=index)

    def slice_of(field: torch.Tensor | None) -> torch.Tensor | None:
        if field is None:
            return None
        part = memory.empty(num_tokens, field.numpy().dtype)
        np.take(field.numpy().reshape(-1), index, out=part, mode="clip")  # every other mode fills a copy first
        return torch.from_numpy(part).view(*field.shape[:2], -1)

    num_microbatches = tensors.num_microbatches
    tokens_of_microbatch = num_tokens // num_microbatches
    whole = Spans.from_array(tensors.spans.numpy(), tensors.spans_stop.numpy(), tokens_of_microbatch * slices.cp)
    spans, spans_stop = slice_spans(
        whole,
        chunk_start=chunk_start,
        chunk_tokens=slices.chunk_tokens,
        chunk_start_in_slice=slices.chunk_start_in_slice,
    ).to_array(num_microbatches, tokens_of_microbatch)
    return replace(
        tensors,
        tokens=slice_of(tokens),
        labels=slice_of(labels),
        spans=torch.from_numpy(spans),
        spans_stop=torch.from_numpy(spans_stop),
    )


def _slices_documents(packing: Packing) -> bool:
    """Whether stretches are documents: packing aligns them, and boundaries stop attention at them."""
    return slice_align(packing) is not None
