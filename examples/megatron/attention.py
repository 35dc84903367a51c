"""Attention that stays inside documents, for Megatron's `core_attention`, also under context parallelism.

In: queries, keys and values of this rank's tokens in THD form, [tokens, heads, head_dim], and the packing of the
microbatch (`PackedSeqParams`: `cu_seqlens_padded` over all its tokens, not cut by CP). Out: [tokens, heads * head_dim].

Used where Transformer Engine cannot be: without CUDA, without TE, or where samples are cut although they hold several
documents (see `model.py`). It needs nothing but torch.

Must hold: a token attends to the tokens of its own document that do not come after it, and to nothing else. A masked
key has weight exactly 0, so what another document says cannot change a single bit. The padding behind a document
belongs to its segment; it comes last, so no real token sees it, and every row has at least one key.

Under CP each rank holds a zigzag slice of the sequence. Keys and values are gathered from the CP group and put back
into the order of the sequence, and each rank computes its own queries; gradients of keys and values are summed over
the group. So CP 2 computes what CP 1 computes, up to the order of float additions between ranks.

Cost: samples * (length / cp) * length scores for each head, since the mask is dense: right for an example, not for 32K.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

Slices = Literal["document", "sample"]
"""What is cut into 2 * cp chunks, of which a rank holds two: each document, or each sample as a whole."""


def positions_of_rank(cu_cut: Tensor, *, cp_size: int, cp_rank: int) -> Tensor:
    """Which tokens of the whole sequence the slice of one CP rank holds, in the order it holds them.

    Each stretch of tokens is cut into 2 * cp_size chunks of equal length. Rank r holds chunks r and
    2 * cp_size - 1 - r, so that early and late tokens, which see few and many keys, are shared out evenly.

    Args:
        cu_cut: [stretches + 1] cumulative lengths of what is cut one by one, int64; every length a multiple of
            2 * cp_size, zero included.
        cp_size: Ranks of the CP group, at least 1.
        cp_rank: This rank, in [0, cp_size).

    Returns:
        [cu_cut[-1] / cp_size] positions in the whole sequence, int64.

    Source: Megatron-LM `get_batch_on_this_cp_rank`; Transformer Engine `thd_get_partitioned_indices`.
    """
    chunk_tokens = torch.diff(cu_cut) // (2 * cp_size)
    starts = torch.stack([cu_cut[:-1] + cp_rank * chunk_tokens, cu_cut[1:] - (cp_rank + 1) * chunk_tokens], dim=1)
    lengths = chunk_tokens.repeat_interleave(2)
    shifts = starts.flatten() - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum()), device=cu_cut.device) + shifts.repeat_interleave(lengths)


def document_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens_padded: Tensor,
    *,
    length: int,
    slices: Slices = "document",
    cp_size: int = 1,
    cp_rank: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention inside each document of a packed microbatch.

    Args:
        query: [tokens, heads, head_dim] of this rank's slice; tokens = samples * length / cp_size.
        keys: [cp_size * tokens, kv_heads, head_dim], the slices of all ranks in rank order; kv_heads divides heads.
        values: [cp_size * tokens, kv_heads, head_dim], likewise.
        cu_seqlens_padded: [documents + 1] cumulative lengths of the documents of the whole microbatch, with padding;
            no document crosses the border of two samples.
        length: Tokens of a sample, all ranks together.
        slices: What CP cut one by one.
        cp_size: Ranks of the CP group.
        cp_rank: This rank, in [0, cp_size).
        scale: Factor of the scores; 1 / sqrt(head_dim) if not given.

    Returns:
        [tokens, heads * head_dim].
    """
    total = keys.size(0)
    samples = total // length
    position = torch.arange(total, device=query.device)
    cu_documents = cu_seqlens_padded.to(device=query.device, dtype=torch.int64)
    document_of_token = torch.bucketize(position, cu_documents[1:], right=True)
    if cp_size > 1:
        cu_cut = cu_documents if slices == "document" else torch.arange(0, total + 1, length, device=query.device)
        held = [positions_of_rank(cu_cut, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
        in_order = torch.argsort(torch.cat(held))
        keys, values = keys[in_order], values[in_order]
        position = held[cp_rank]

    # Documents do not cross samples, so scores between samples need not be computed at all.
    row = position.view(samples, -1, 1)
    column = torch.arange(total, device=query.device).view(samples, 1, length)
    visible = (document_of_token[row] == document_of_token[column]) & (column <= row)
    out = functional.scaled_dot_product_attention(
        query.view(samples, -1, *query.shape[1:]).transpose(1, 2),
        keys.view(samples, length, *keys.shape[1:]).transpose(1, 2),
        values.view(samples, length, *values.shape[1:]).transpose(1, 2),
        attn_mask=visible.unsqueeze(1),
        scale=scale,
        enable_gqa=query.size(1) != keys.size(1),
    )
    return out.transpose(1, 2).reshape(query.size(0), -1)


class _Gather(torch.autograd.Function):
    """[tokens, ...] of each rank -> [cp * tokens, ...] on every rank, in rank order; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)  # a reduce-scatter moves less, but not every gloo has one
        return whole.chunk(ctx.group.size())[ctx.group.rank()], None


class DocumentAttention(torch.nn.Module):
    """`document_attention` with the constructor and the call of Megatron's `core_attention`.

    Args:
        config: Megatron's `TransformerConfig`.
        layer_number: Not used, like the other arguments that Megatron passes to every attention.
        length: Tokens of a sample.
        slices: What CP cut one by one.
        softmax_scale: Factor of the scores; 1 / sqrt(head_dim) if not given.
        pg_collection: Megatron's process groups; `cp` is used.

    Raises:
        ValueError: The configuration asks for attention dropout, which this attention does not have.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        length: int,
        slices: Slices,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError(f"DocumentAttention has no dropout, set attention_dropout {config.attention_dropout} to 0")
        self.length = length
        self.slices = slices
        self.scale = softmax_scale
        self.group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[tokens, heads, head_dim] of one microbatch -> [tokens, heads * head_dim]; `attention_mask` is ignored.

        Raises:
            ValueError: There is no `packed_seq_params`: documents would see each other.
        """
        if packed_seq_params is None:
            raise ValueError("DocumentAttention needs packed_seq_params, which say where documents end; pass them")
        group, cp_size, length = self.group, self.group.size(), self.length
        if getattr(packed_seq_params, "local_cp_size", None) is not None:  # this microbatch has ranks of its own
            cp_size = packed_seq_params.local_cp_size
            group = self.group if cp_size == 1 else packed_seq_params.cp_group
            length = query.size(0) * cp_size
        if cp_size > 1:
            key, value = _Gather.apply(key, group), _Gather.apply(value, group)
        return document_attention(
            query,
            key,
            value,
            packed_seq_params.cu_seqlens_q_padded,
            length=length,
            slices=self.slices,
            cp_size=cp_size,
            cp_rank=group.rank() if cp_size > 1 else 0,
            scale=self.scale,
        )
