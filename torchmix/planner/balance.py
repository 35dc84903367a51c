"""Sizes -> costs -> (rank, microbatch): who computes what, when."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError, RecipeError
from torchmix.parallel.place_tree import Layout
from torchmix.recipe.modules import cost_key_of
from torchmix.recipe.structs import Balance, EncoderModel, Model

# --- Sizes -> cost: what a sample costs its rank.
#
# Integers, so that every leader and every later run computes the same. Cost: one pass over the pieces.


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


def cost_model(model: Model | None, *, boundaries: str, vocab_size: int | None = None) -> CostModel:
    """The cost model of a dense causal transformer.

    Floating-point operations per token and layer: 4h^2 + 4h x h_kv for the attention's projections (h_kv is the width
    of keys or values), and 6h x ffn for a gated MLP. Per pair of tokens and layer: 2h (4h, and half of the pairs are
    masked). With `experts_per_token` the MLP counts as often. The output layer adds 2h x vocab per token; a model
    without `vocab` takes the recipe's `vocab_size`. All terms are divided by 2h and summed over the layers, so they are
    integers.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, per document.
    """
    whole_sample = boundaries == "none"
    if model is None:
        return CostModel(per_token=1, per_pair=0, whole_sample=whole_sample)
    kv_hidden = model.hidden * (model.kv_heads or model.heads) // model.heads
    per_layer = 2 * model.hidden + 2 * kv_hidden + 3 * model.ffn * (model.experts_per_token or 1)
    vocab = (vocab_size or 0) if model.vocab is None else model.vocab
    return CostModel(per_token=model.layers * per_layer + vocab, per_pair=model.layers, whole_sample=whole_sample)


def _fitted_cost(balance: Balance, boundaries: str, vocab_size: int | None) -> CostModel:
    assert balance.cost is not None, "of a recipe with a fitted cost"
    cost = balance.cost
    return CostModel(per_token=cost.per_token, per_pair=cost.per_pair, whole_sample=boundaries == "none")


def _model_cost(balance: Balance, boundaries: str, vocab_size: int | None) -> CostModel:
    return cost_model(balance.model, boundaries=boundaries, vocab_size=vocab_size)


COST_OF_KEY: dict[str | None, Callable[[Balance, str, int | None], CostModel]] = {
    None: _model_cost,
    "cost": _fitted_cost,
    "model": _model_cost,
}
"""By the keys of the recipe's `COSTS`, from its `balance`, boundaries and `vocab_size`; None: without one of them."""


def cost_of_recipe(balance: Balance, *, boundaries: str, vocab_size: int | None) -> CostModel:
    """What samples cost by the keys of a recipe."""
    return COST_OF_KEY[cost_key_of(balance)](balance, boundaries, vocab_size)


class EncoderCost(msgspec.Struct, frozen=True, kw_only=True):
    """cost = size x (per_unit + per_pair x seen + per_window x min(seen, window_units)), where a unit sees those of its
    segment, size / segments; and bytes = size x bytes_per_unit."""

    per_unit: int
    per_pair: int = 0
    per_window: int = 0
    window_units: int = 0
    bytes_per_unit: int = 0

    def __call__(self, size: NDArray[np.int64], segments: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """int64 [n] cost of items.

        Args:
            size: [n] units of each.
            segments: [n] parts of each inside which units attend to each other; None: each is one.

        Raises:
            PlanError: The costs of these items together exceed 64 bits.
        """
        seen = size if segments is None else -(-size // np.maximum(segments, 1))
        largest, widest = int(size.max(initial=0)), int(seen.max(initial=0))
        most = largest * (self.per_unit + self.per_pair * widest + self.per_window * self.window_units)
        if most * len(size) >= 1 << 63:
            raise PlanError(f"{len(size)} items of at most {largest} units could cost {most} each: above 64 bits")
        of_unit = self.per_unit + self.per_pair * seen + self.per_window * np.minimum(seen, self.window_units)
        cost: NDArray[np.int64] = size * of_unit
        return cost

    def bytes_of_items(self, size: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n] bytes of activations of items."""
        return size * self.bytes_per_unit


def encoder_cost(model: EncoderModel | None) -> EncoderCost:
    """The cost of an item of a module: a transformer in which all units of a segment attend to each other.

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


# --- Samples -> (rank, microbatch): who computes what, when.
#
# Every sample is placed once; every rank has the same number of samples; samples are not changed. Cost: 0.4 us a
# sample.
#
# Each microbatch of a synchronous step takes as long as its slowest rank. So samples of similar cost go into the same
# microbatch on all ranks (method `rows`). Equal sums per rank alone gain almost nothing.


class Placement(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where each sample goes. Arrays int64 [G]."""

    dp_rank_of_sample: Int64Array
    microbatch_of_sample: Int64Array
    slot_of_sample: Int64Array
    """Index in the microbatch; samples of a microbatch are in ascending order."""


class BalanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a step: the sum over microbatches of the slowest rank's cost."""

    cost: int
    """Cost of the placement."""
    hash_order_cost: int
    """Cost without balancing: samples in the order of their numbers, which are a hash."""
    lower_bound: int
    """No placement of these samples is cheaper than this."""
    took_hash_order: bool = False
    """Whether the method's placement was dearer than hash order, which was taken instead."""
    left_text: bool = False
    """Whether items could not stay near their text within the tolerance, and were placed without a look at it."""

    @property
    def ratio(self) -> float:
        """Cost over its lower bound, 1 or more."""
        return self.cost / self.lower_bound

    @property
    def hash_order_ratio(self) -> float:
        """The value of `ratio` without balancing."""
        return self.hash_order_cost / self.lower_bound


def in_hash_order(num_samples: int, layout: Layout) -> Placement:
    """Place samples by their number, microbatch by microbatch."""
    layout.num_microbatches(num_samples)
    sample = np.arange(num_samples, dtype=np.int64)
    return Placement(
        dp_rank_of_sample=sample // layout.micro_batch_size % layout.dp,
        microbatch_of_sample=sample // layout.row_samples,
        slot_of_sample=sample % layout.micro_batch_size,
    )


def in_rows(cost_of_sample: Int64Array, layout: Layout, *, microbatches: str = "unimodal") -> Placement:
    """Place samples of like cost into the same microbatch of all ranks.

    Samples are sorted by cost and cut into blocks of dp samples. This minimises the sum, over blocks, of the largest
    cost in a block (an exchange argument). Inside a block the most expensive sample goes to the rank with the lowest
    cost in this microbatch so far, then with the lowest cost in the step. With micro_batch_size 1 no placement has
    cheaper rows. The microbatches are then ordered with the small ones at both ends. That order is best for a 1F1B
    pipeline, and all orders are equal without one.

    Args:
        cost_of_sample: int64 [G]; ties go to the lower sample number, then the lower rank.
        layout: What the samples are placed on.
        microbatches: `unimodal`, with small ones at both ends; else the costliest row is the first.
    """
    num_samples = len(cost_of_sample)
    num_microbatches, dp = layout.num_microbatches(num_samples), layout.dp
    by_cost = np.argsort(-cost_of_sample, kind="stable")
    costs = cost_of_sample[by_cost].tolist()
    load = [(0, 0)] * dp  # cost in this microbatch, cost in the step
    dealt: list[int] = []
    for start in range(0, num_samples, dp):
        if start % layout.row_samples == 0:
            load = [(0, total) for _, total in load]
        least_loaded = sorted(range(dp), key=load.__getitem__)
        for dp_rank, cost in zip(least_loaded, costs[start : start + dp], strict=True):
            here, total = load[dp_rank]
            load[dp_rank] = here + cost, total + cost
        dealt += least_loaded
    rank, microbatch = np.empty(num_samples, np.int64), np.empty(num_samples, np.int64)
    rank[by_cost] = dealt
    in_time = small_at_both_ends(num_microbatches) if microbatches == "unimodal" else np.arange(num_microbatches)
    microbatch[by_cost] = np.repeat(in_time, layout.row_samples)
    bin_of_sample = rank * num_microbatches + microbatch
    slot = np.empty(num_samples, np.int64)
    slot[np.argsort(bin_of_sample, kind="stable")] = np.arange(num_samples) % layout.micro_batch_size
    return Placement(dp_rank_of_sample=rank, microbatch_of_sample=microbatch, slot_of_sample=slot)


def small_at_both_ends(count: int) -> Int64Array:
    """Microbatch of each row, for rows in descending order of cost: the most expensive row is in the middle."""
    rows = np.arange(count, dtype=np.int64)
    in_time = np.concatenate([rows[1::2][::-1], rows[0::2]])
    microbatch_of_row = np.empty(count, np.int64)
    microbatch_of_row[in_time] = rows
    return microbatch_of_row


def report(cost_of_sample: Int64Array, placement: Placement, layout: Layout) -> BalanceReport:
    """Cost of a placement against its lower bound and against hash order."""
    plain = in_hash_order(len(cost_of_sample), layout)
    total = int(cost_of_sample.sum())
    return BalanceReport(
        cost=_slowest_rank_sum(cost_of_sample, placement, layout.dp),
        hash_order_cost=_slowest_rank_sum(cost_of_sample, plain, layout.dp),
        lower_bound=max(-(-total // layout.dp), int(cost_of_sample.max()), 1),
    )


def _slowest_rank_sum(cost_of_sample: Int64Array, placement: Placement, dp: int) -> int:
    num_microbatches = int(placement.microbatch_of_sample.max()) + 1
    bins = np.zeros(num_microbatches * dp, np.int64)
    np.add.at(bins, placement.microbatch_of_sample * dp + placement.dp_rank_of_sample, cost_of_sample)
    return int(bins.reshape(num_microbatches, dp).max(axis=1).sum())
