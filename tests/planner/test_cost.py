from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.planner.balance import COST_OF_KEY, CostModel, cost_model, cost_of_recipe, encoder_cost
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.planner import Planner
from torchmix.recipe.modules import COSTS
from torchmix.recipe.structs import Balance, EncoderModel, FittedCost, Model

LLAMA_8B = Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128_256)


def flops_of_a_document(model: Model, tokens: int) -> int:
    """Forward floating-point operations of one document, two for each multiply-add, causal attention."""
    kv = model.hidden * (model.kv_heads or model.heads) // model.heads
    projections = 2 * tokens * (2 * model.hidden**2 + 2 * model.hidden * kv)
    mlp = 2 * tokens * 3 * model.hidden * model.ffn
    attention = 2 * 2 * model.hidden * tokens * tokens // 2  # scores and values, half of the pairs masked
    return model.layers * (projections + mlp + attention) + 2 * tokens * model.hidden * (model.vocab or 0)


@pytest.mark.parametrize(
    "model",
    [LLAMA_8B, Model(layers=2, hidden=64, ffn=256, heads=4), Model(layers=4, hidden=96, ffn=1, heads=3, kv_heads=1)],
)
@pytest.mark.parametrize("tokens", [1, 100, 8192, 131_072])
def test_cost_is_the_work_of_a_transformer_in_units_of_twice_its_width(model, tokens):
    cost = cost_model(model, boundaries="document")
    alone = cost.of_samples(np.array([tokens]), np.array([0]), num_samples=1, length=tokens)
    assert int(alone[0]) * 2 * model.hidden == flops_of_a_document(model, tokens)


def test_a_sample_costs_its_length_once_and_the_square_of_each_of_its_pieces():
    rng = np.random.default_rng(40)
    for _ in range(30):
        num_samples = int(rng.integers(1, 9))
        sample = np.sort(rng.integers(0, num_samples, int(rng.integers(0, 40))))
        tokens = rng.integers(1, 300, len(sample))
        expected = [7 * 1024] * num_samples
        for piece_sample, piece_tokens in zip(sample.tolist(), tokens.tolist(), strict=True):
            expected[piece_sample] += 3 * piece_tokens**2
        cost = CostModel(per_token=7, per_pair=3, whole_sample=False)
        made = cost.of_samples(tokens, sample, num_samples=num_samples, length=1024)
        assert made.dtype == np.int64
        assert made.tolist() == expected


def test_attention_across_documents_makes_all_samples_equal():
    cost = cost_model(LLAMA_8B, boundaries="none")
    made = cost.of_samples(np.array([5, 900, 3]), np.array([0, 0, 2]), num_samples=3, length=1000)
    assert len(set(made.tolist())) == 1
    whole = cost_model(LLAMA_8B, boundaries="document")
    assert made[0] == whole.of_samples(np.array([1000]), np.array([0]), num_samples=1, length=1000)[0]


def test_without_a_model_every_sample_costs_its_tokens():
    cost = cost_model(None, boundaries="document")
    assert cost.of_samples(np.array([5, 900]), np.array([0, 1]), num_samples=2, length=1000).tolist() == [1000, 1000]


def test_a_batch_of_million_token_samples_of_a_large_model_stays_inside_64_bits():
    model = Model(layers=128, hidden=16_384, ffn=65_536, heads=128, vocab=256_000)
    length, num_samples = 2**20, 2**10
    cost = cost_model(model, boundaries="document")
    made = cost.of_samples(np.full(num_samples, length), np.arange(num_samples), num_samples=num_samples, length=length)
    assert made[0] * 2 * model.hidden == flops_of_a_document(model, length)
    assert len(set(made.tolist())) == 1
    assert sum(made.tolist()) < 2**63


def test_the_vocabulary_of_the_recipe_is_that_of_a_model_that_says_none() -> None:
    plain = msgspec.structs.replace(LLAMA_8B, vocab=None)
    without = cost_model(plain, boundaries="document")
    assert cost_model(plain, boundaries="document", vocab_size=128_256) == cost_model(LLAMA_8B, boundaries="document")
    assert cost_model(msgspec.structs.replace(LLAMA_8B, vocab=0), boundaries="document", vocab_size=9) == without
    costs = [backbone_cost(planner_with(vocab_size=size).part) for size in (1_000, None)]
    assert costs[0].per_token == costs[1].per_token + 1_000


def planner_with(*, vocab_size: int | None) -> Planner:
    """The cost of a recipe whose model says no vocabulary."""
    model = Model(layers=2, hidden=8, ffn=8, heads=2)
    recipe = msgspec.structs.replace(
        make_recipe({"web": "100%"}), balance=Balance(method="rows", model=model), vocab_size=vocab_size
    )
    return make_planner(recipe, {"web": synthetic_sizes(40, shortest=1, longest=9)})


@pytest.mark.parametrize("experts", [1, 2, 8])
def test_a_mixture_of_experts_computes_the_block_of_each_expert_that_a_token_has(experts: int) -> None:
    sparse = Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000, experts_per_token=experts)
    dense = Model(layers=32, hidden=4096, ffn=14336 * experts, heads=32, kv_heads=8, vocab=32000)
    one, other = (cost_model(model, boundaries="document") for model in (sparse, dense))
    assert one == other
    alone = one.of_samples(np.array([3000]), np.array([0]), num_samples=1, length=3000)
    assert int(alone[0]) * 2 * 4096 == flops_of_a_document(dense, 3000)
    # Attention is the same whatever the experts, so long documents weigh less in a sparse model.
    assert one.per_pair == 32


def flops_of_an_image(model: EncoderModel, patches: int, window: int | None) -> int:
    """Forward floating-point operations of one image, layer by layer; all patches of a window attend to each other."""
    hidden, matrices = model.hidden, 3 if model.mlp == "swiglu" else 2
    kv = hidden * (model.kv_heads or model.heads) // model.heads
    total = 2 * patches * 3 * (model.patch or 0) ** 2 * hidden
    for layer in range(model.layers):
        attended = patches if window is None or layer in model.full_layers else min(patches, window)
        total += 2 * patches * (2 * hidden**2 + 2 * hidden * kv + matrices * hidden * model.ffn)
        total += 2 * 2 * patches * attended * hidden
    if model.out is not None:
        merged = model.merge**2 * hidden
        total += 2 * (patches // model.merge**2) * (merged * merged + merged * model.out)
    return total


@pytest.mark.parametrize("patches", [4, 64, 1024, 16_384])
@pytest.mark.parametrize(
    ("model", "window"),
    [
        (EncoderModel(layers=3, hidden=64, ffn=256, heads=4), None),
        (EncoderModel(layers=3, hidden=64, ffn=256, heads=4, kv_heads=2, mlp="swiglu", patch=14), None),
        # Windows of 112 pixels are 8 x 8 patches of 14; two layers see the whole image, as in Qwen2.5-VL.
        (
            EncoderModel(
                layers=8,
                hidden=64,
                ffn=200,
                heads=4,
                mlp="swiglu",
                patch=14,
                window=112,
                full_layers=(3, 7),
                merge=2,
                out=96,
            ),
            64,
        ),
        (EncoderModel(layers=4, hidden=32, ffn=64, heads=2, window=100), 100),
    ],
)
def test_an_encoder_costs_its_layers_its_windows_and_its_merge(
    model: EncoderModel, window: int | None, patches: int
) -> None:
    cost = encoder_cost(model)
    assert int(cost(np.array([patches]))[0]) * 2 * model.hidden == flops_of_an_image(model, patches, window)


def test_a_window_makes_the_cost_of_large_images_grow_with_their_size_alone() -> None:
    full = encoder_cost(EncoderModel(layers=4, hidden=64, ffn=128, heads=4))
    windowed = encoder_cost(EncoderModel(layers=4, hidden=64, ffn=128, heads=4, window=64))
    sizes = np.array([16, 64, 1000, 2000])
    assert full(sizes)[:2].tolist() == windowed(sizes)[:2].tolist()
    assert windowed(sizes)[3] == 2 * windowed(sizes)[2]
    assert full(sizes)[3] > 2 * full(sizes)[2]


def test_units_attend_inside_their_segments() -> None:
    """Four chunks of a sound cost as four sounds of a chunk; a video costs as its grids in time."""
    windowed = EncoderModel(layers=4, hidden=64, ffn=128, heads=4, window=64, full_layers=(1,), out=32)
    for model in (EncoderModel(layers=4, hidden=64, ffn=128, heads=4), windowed):
        cost = encoder_cost(model)
        one = cost(np.array([50, 1500, 400]))
        assert cost(np.array([200, 6000, 400]), np.array([4, 4, 1])).tolist() == [4 * one[0], 4 * one[1], one[2]]
        assert cost(np.array([6000]))[0] > 4 * one[1]


def test_both_halves_of_the_table_have_the_same_costs_and_the_first_key_counts() -> None:
    assert {None, *COSTS} == set(COST_OF_KEY)
    fitted = FittedCost(per_token=7, per_pair=3)
    for balance, expected in (
        (Balance(), cost_model(None, boundaries="document")),
        (Balance(model=LLAMA_8B), cost_model(LLAMA_8B, boundaries="document")),
        (Balance(cost=fitted), CostModel(per_token=7, per_pair=3, whole_sample=False)),
        (Balance(model=LLAMA_8B, cost=fitted), CostModel(per_token=7, per_pair=3, whole_sample=False)),
    ):
        assert cost_of_recipe(balance, boundaries="document", vocab_size=None) == expected
