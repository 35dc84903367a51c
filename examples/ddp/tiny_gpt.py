"""A small GPT in plain torch, whose attention stays inside documents.

In: tokens and positions [samples, length], and `cu_seqlens_padded` of their microbatch. Out: logits. Cost: that of a
toy.
"""

from __future__ import annotations

import torch
from document_attention import one_by_one
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """x: [tokens, hidden]."""
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), 3, self.heads, -1).unbind(1)
        x = x + self.out(one_by_one(q, k, v, cu_seqlens_padded).flatten(1))
        return x + self.ffn(self.norms[1](x))


class TinyGPT(nn.Module):
    """Embeddings, blocks, logits."""

    def __init__(self, *, vocab: int, length: int, hidden: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor, position_ids: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """tokens, position_ids: int64 [samples, length] -> [samples, length, vocab]."""
        x = (self.token(tokens) + self.position(position_ids)).flatten(0, 1)
        for block in self.blocks:
            x = block(x, cu_seqlens_padded)
        logits: Tensor = self.head(self.norm(x))
        return logits.view(*tokens.shape, -1)


def loss_sum(logits: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    """The losses of a microbatch, summed over the tokens that have one; labels are shifted already."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return torch.sum(losses * loss_mask.flatten())
