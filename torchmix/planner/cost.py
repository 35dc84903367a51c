"""Sizes -> cost: what a sample costs its rank.

In: lengths of pieces and their samples. Out: int64 cost of each sample, in units of 2 x hidden floating-point
operations of a forward pass. Must hold: integers, so that every leader and every later run computes the same. Cost:
one pass over the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import RecipeError
from torchmix.recipe.structs import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """cost = per_token x tokens + per_pair x sum(length^2), over the lengths within which tokens attend."""

    per_token: int
    per_pair: int
    whole_sample: bool
    """Attention spans the whole sample (`boundaries: none`), not each document."""

    def check_fits(self, *, num_samples: int, length: int) -> None:
        """Refuse a model for which the cost of a whole batch would not fit 64 bits.

        Raises:
            RecipeError: The largest possible cost exceeds 64 bits; the message names it.
        """
        largest = num_samples * length * (self.per_token + self.per_pair * length)
        if largest >= 1 << 63:
            raise RecipeError(
                f"a batch of {num_samples} samples of {length} tokens could cost {largest}, which exceeds 64 bits; "
                f"check layers, hidden, ffn and vocab",
                "balance.model",
            )

    def of_samples(
        self, tokens: NDArray[np.int64], sample: NDArray[np.int64], *, num_samples: int, length: int
    ) -> NDArray[np.int64]:
        """Cost of each sample.

        Args:
            tokens: [n] tokens of each piece.
            sample: [n] sample of each piece, ascending.
            num_samples, length: Samples of the global batch, and tokens per sample. Linear work is done for padding
                too, so every sample counts `length` tokens.

        Returns:
            int64 [num_samples].
        """
        if self.whole_sample:
            return np.full(num_samples, self.per_token * length + self.per_pair * length * length, np.int64)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens * tokens)])
        edges = np.searchsorted(sample, np.arange(num_samples + 1))
        return self.per_token * length + self.per_pair * np.diff(before[edges])


def cost_model(model: Model | None, *, boundaries: str, vocab_size: int | None = None) -> CostModel:
    """The cost model of a dense causal transformer.

    Floating-point operations per token and layer: 4h^2 + 4h x h_kv for the attention's projections (h_kv is the width
    of keys or values), and 6h x ffn for a gated MLP. Per pair of tokens and layer: 2h (4h, and half of the pairs are
    masked). The output layer adds 2h x vocab per token; a model without `vocab` takes the recipe's `vocab_size`. All
    terms are divided by 2h and summed over the layers, so they are integers.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, per document.
    """
    whole_sample = boundaries == "none"
    if model is None:
        return CostModel(per_token=1, per_pair=0, whole_sample=whole_sample)
    kv_hidden = model.hidden * (model.kv_heads or model.heads) // model.heads
    per_layer = 2 * model.hidden + 2 * kv_hidden + 3 * model.ffn
    vocab = (vocab_size or 0) if model.vocab is None else model.vocab
    return CostModel(per_token=model.layers * per_layer + vocab, per_pair=model.layers, whole_sample=whole_sample)
