"""The boundaries of a microbatch as Megatron's `PackedSeqParams`, for attention that stays inside documents.

In: a `Microbatch`. Out: Megatron's dataclass in the `thd` format: all samples of the microbatch as one row of tokens.

Must hold: `cu_seqlens` (true lengths) and `cu_seqlens_padded` (where documents lie) go over the whole microbatch, not
cut by context parallelism, as Megatron and Transformer Engine expect. Queries and keys have the same boundaries. Only
fields that the installed Megatron knows are filled, since the dataclass grows from version to version.

Megatron is imported inside the function: torchmix does not depend on it. Cost: a transfer of two small arrays.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from torchmix.constructor.fields import Microbatch

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def packed_seq_params(microbatch: Microbatch, *, device: torch.device | str | None = None) -> PackedSeqParams:
    """Build Megatron's packing of one microbatch.

    The model then takes its tokens as one row, [1, micro_batch_size * length / cp].

    Args:
        microbatch: From a torchmix loader, on any rank.
        device: Where the boundaries should live; where they are if not given.

    Returns:
        `PackedSeqParams` with `qkv_format` "thd", int32 boundaries [segments + 1], and `max_seqlen` in tokens.

    Raises:
        ImportError: megatron-core is not installed.

    Source: Megatron-LM `pretrain_gpt.py`, `forward_step`.
    """
    cu_seqlens, cu_seqlens_padded = microbatch.cu_seqlens, microbatch.cu_seqlens_padded
    if device is not None:
        cu_seqlens = cu_seqlens.to(device, non_blocking=True)
        cu_seqlens_padded = cu_seqlens_padded.to(device, non_blocking=True)
    return params_of_boundaries(cu_seqlens, cu_seqlens_padded, microbatch.max_seqlen)


def params_of_boundaries(cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor, max_seqlen: int) -> PackedSeqParams:
    """Megatron's dataclass of these boundaries, the same for queries and keys.

    Args:
        cu_seqlens: int32 [segments + 1], by true lengths; those with padding, where padding is to be computed, too.
        cu_seqlens_padded: int32 [segments + 1], by padded lengths.
        max_seqlen: Tokens of the longest segment.

    Raises:
        ImportError: megatron-core is not installed.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    wanted: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens_padded,
        "cu_seqlens_kv_padded": cu_seqlens_padded,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }
    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    return PackedSeqParams(**{name: value for name, value in wanted.items() if name in known})
