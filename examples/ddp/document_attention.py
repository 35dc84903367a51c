"""Attention that stays inside documents, with torch's own kernels, from a microbatch's `cu_seqlens_padded`.

In: queries, keys and values of the tokens of a microbatch end to end, [tokens, heads, head_dim], and where segments
lie. Out: [tokens, heads, head_dim]. Two ways that give the same:

    one_by_one  scaled_dot_product_attention for each segment: runs everywhere, forward and backward; a call a segment
    flex        flex_attention with a block mask: one kernel on CUDA, where it is compiled; on a CPU forward alone

Must hold: a token attends to the tokens of its own segment that do not come after it, and to nothing else. Padding lies
at the end of its segment, so no real token sees it. Cost: one_by_one as many scores as the segments have pairs; flex
skips blocks without any, and its mask is made once for all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
    """Causal attention, segment by segment.

    Args:
        q, k, v: [tokens, heads, head_dim].
        cu_seqlens_padded: int32 [segments + 1] of the microbatch; segments of no tokens may stand among them.
    """
    lengths = [length for length in cu_seqlens_padded.diff().tolist() if length]
    parts = zip(*(tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (q, k, v)), strict=True)
    outputs = [functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def mask_of_documents(cu_seqlens_padded: Tensor, num_tokens: int) -> BlockMask:
    """The mask for `flex`; make it once for each microbatch, on the device of the model."""
    segment = torch.repeat_interleave(cu_seqlens_padded.diff().long())

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (segment[query] == segment[key]) & (query >= key)

    return create_block_mask(sees, None, None, num_tokens, num_tokens, device=cu_seqlens_padded.device)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Causal attention by one call; on CUDA give it `torch.compile(flex_attention)`, which fuses it."""
    output = flex_attention(*(tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)), block_mask=mask)
    assert isinstance(output, Tensor), "no auxiliary output was asked for"
    return output.squeeze(0).transpose(0, 1)
