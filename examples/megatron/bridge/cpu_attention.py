"""The attention of `../attention.py` in the place of Megatron's local one, which knows no documents and no slices.

Likewise the slices that Transformer Engine cuts of packed documents, by the formula that it documents.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from attention import DocumentAttention, positions_of_rank
from torch import Tensor


class Slices:
    """Stands for `transformer_engine_torch`."""

    @staticmethod
    def thd_get_partitioned_indices(cu_seqlens: Tensor, total: int, cp_size: int, cp_rank: int) -> Tensor:
        """Which tokens of a packed row a rank has."""
        cut = cu_seqlens.to(torch.int64)
        assert int(cut[-1]) == total, "boundaries go over the whole row"
        return positions_of_rank(cut, cp_size=cp_size, cp_rank=cp_rank)


def attention_of(length: int) -> type[DocumentAttention]:
    """A class for samples of so many tokens, packed or not."""

    class CpuAttention(DocumentAttention):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, length=length, slices="document", **options)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            packed = options.pop("packed_seq_params", None)
            if packed is not None:
                ends = SimpleNamespace(cu_seqlens_q_padded=packed.cu_seqlens_q)
                return super().forward(query, key, value, *args, packed_seq_params=ends, **options)
            tokens, samples = query.shape[:2]
            ends = torch.arange(samples + 1, dtype=torch.int32) * (tokens * self.group.size())
            rows = [field.transpose(0, 1).reshape(-1, *field.shape[2:]) for field in (query, key, value)]
            out = super().forward(*rows, *args, packed_seq_params=SimpleNamespace(cu_seqlens_q_padded=ends), **options)
            return out.view(samples, tokens, -1).transpose(0, 1).contiguous()

    return CpuAttention
