"""Sizes -> cost: what a sample costs its rank.

In: lengths of pieces and their samples. Out: int64 cost of each sample, in units of 2 x hidden floating-point
operations of a forward pass. Must hold: integers, so that every leader and every later run computes the same. Cost:
one pass over the pieces.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import PlanError, RecipeError
from torchmix.recipe.balance.structs import EncoderModel, FittedCost, Model


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """cost = per_token x tokens + per_pair x sum(length^2), over the lengths within which tokens attend."""

    per_token: int
    per_pair: int
    whole_sample: bool
    """Attention spans the whole sample (`boundaries: none`), not each document."""

    def __call__(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n] cost of pieces by their tokens, without padding."""
        return tokens * (self.per_token + self.per_pair * tokens)

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
        if self.whole_sample:  # whatever lies in it
            return np.full(num_samples, self.per_token * length + self.per_pair * length * length, np.int64)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens * tokens)])
        edges = np.searchsorted(sample, np.arange(num_samples + 1))
        return self.per_token * length + self.per_pair * np.diff(before[edges])


def cost_model(
    model: Model | None, *, boundaries: str, vocab_size: int | None = None, fitted: FittedCost | None = None
) -> CostModel:
    """The cost model of a dense causal transformer.

    Floating-point operations per token and layer: 4h^2 + 4h x h_kv for the attention's projections (h_kv is the width
    of keys or values), and 6h x ffn for a gated MLP. Per pair of tokens and layer: 2h (4h, and half of the pairs are
    masked). With `experts_per_token` the MLP counts as often. The output layer adds 2h x vocab per token; a model
    without `vocab` takes the recipe's `vocab_size`. All terms are divided by 2h and summed over the layers, so they are
    integers.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, per document.
    """
    whole_sample = boundaries == "none"
    if fitted is not None:
        return CostModel(per_token=fitted.per_token, per_pair=fitted.per_pair, whole_sample=whole_sample)
    if model is None:
        return CostModel(per_token=1, per_pair=0, whole_sample=whole_sample)
    kv_hidden = model.hidden * (model.kv_heads or model.heads) // model.heads
    per_layer = 2 * model.hidden + 2 * kv_hidden + 3 * model.ffn * (model.experts_per_token or 1)
    vocab = (vocab_size or 0) if model.vocab is None else model.vocab
    return CostModel(per_token=model.layers * per_layer + vocab, per_pair=model.layers, whole_sample=whole_sample)


class EncoderCost(msgspec.Struct, frozen=True, kw_only=True):
    """cost = per_unit x size + per_pair x size^2 + per_window x size x min(size, window_units), and bytes = size x
    bytes_per_unit."""

    per_unit: int
    per_pair: int = 0
    per_window: int = 0
    window_units: int = 0
    bytes_per_unit: int = 0

    def of_items(self, size: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n] cost of items by their sizes.

        Raises:
            PlanError: The costs of these items together exceed 64 bits.
        """
        largest = int(size.max(initial=0))
        most = largest * (self.per_unit + self.per_pair * largest + self.per_window * self.window_units)
        if most * len(size) >= 1 << 63:
            raise PlanError(f"{len(size)} items of at most {largest} units could cost {most} each: above 64 bits")
        of_unit = self.per_unit + self.per_pair * size + self.per_window * np.minimum(size, self.window_units)
        cost: NDArray[np.int64] = size * of_unit
        return cost

    def bytes_of_items(self, size: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n] bytes of activations of items."""
        return size * self.bytes_per_unit


def encoder_cost(model: EncoderModel | None) -> EncoderCost:
    """The cost of an item of a module: a transformer in which all units of an item attend to each other.

    Floating-point operations per unit and layer: 4d^2 + 4d x d_kv for the projections, 4df (6df with a gate) for the
    MLP, and 4d per unit attended to. A merging block of m x m units takes 2m^2 d^2 + 2d x out per unit, the embedding
    of a patch of p x p pixels 6p^2 d. All are divided by 2d. Bytes of activations, in two bytes a number, without
    recomputing and without the matrix of attention: per unit and layer 2(6d + 2 d_kv + 2f), with a gate 3f.

    Sources: Korthikanti et al. 2022 (arXiv 2205.05198) for both; Qwen2.5-VL's technical report for windows.
    """
    if model is None:
        return EncoderCost(per_unit=1)
    kv_hidden = model.hidden * (model.kv_heads or model.heads) // model.heads
    ffn = model.ffn * (3 if model.mlp == "swiglu" else 2)
    per_unit = model.layers * (2 * model.hidden + 2 * kv_hidden + ffn)
    if model.out is not None:
        per_unit += model.merge**2 * model.hidden + model.out
    if model.patch is not None:
        per_unit += 3 * model.patch**2
    full = model.layers if model.window is None else len(model.full_layers)
    window_units = 0
    if model.window is not None:
        window_units = max(1, model.window // model.patch) ** 2 if model.patch else model.window
    return EncoderCost(
        per_unit=per_unit,
        per_pair=2 * full,
        per_window=2 * (model.layers - full),
        window_units=window_units,
        bytes_per_unit=2 * model.layers * (6 * model.hidden + 2 * kv_hidden + ffn),
    )
