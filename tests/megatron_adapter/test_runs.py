"""Runs of ranks under Megatron's flags: what agrees, what is refused by name, and what Megatron is handed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.fake_megatron import default_args, installed
from tests.support.microbatches import make_microbatch
from tests.support.mixtures import SHARES
from tests.support.recipes import make_recipe
from torchmix.constructor.fields import Microbatch
from torchmix.errors import RecipeError
from torchmix.megatron_adapter.bins import planned_step, take_over
from torchmix.megatron_adapter.flags import check_refusals
from torchmix.megatron_adapter.microbatches import SharedMicrobatches
from torchmix.megatron_adapter.runs import has_several_sizes, recipe_for
from torchmix.recipe.structs import Balance, Context, FittedCost, Packing, Recipe

PLAIN = make_recipe(SHARES, samples=8, length=64)
HYBRID = {"hybrid_context_parallel": True, "dataloader_type": "single", "max_seqlen_per_dp_cp_rank": 32}
DYNAMIC = {
    "dynamic_context_parallel": True,
    "sequence_packing_scheduler": "default_dynamic_cp",
    "dataloader_type": "single",
    "max_seqlen_per_dp_cp_rank": 32,
    "min_dynamic_context_parallel_size": 1,
}
BALANCED = {**DYNAMIC, "dynamic_context_parallel": False, "sequence_packing_scheduler": "dp_balanced"}


def with_runs(**context: Any) -> Recipe:
    balance = Balance(context=Context(**{"rank_tokens": 32, **context}), cost=FittedCost(per_token=1, per_pair=1))
    return replace(PLAIN, packing=Packing(method="whole"), balance=balance)


def check(recipe: Recipe, *, cp: int = 2, pp: int = 1, **changes: Any) -> None:
    args = default_args(**{"data_parallel_size": 4, "context_parallel_size": cp, **changes})
    check_refusals(args, recipe, cp=cp, pp=pp)


def test_both_ways_agree_with_a_recipe_of_runs() -> None:
    check(with_runs(), **HYBRID)
    check(with_runs(sizes=(1, 2, 4)), **HYBRID)
    check(with_runs(), pp=2, **DYNAMIC)
    check(with_runs(sizes=(2,)), **BALANCED)
    check(PLAIN)


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (PLAIN, HYBRID, r"--hybrid-context-parallel: the recipe plans one context-parallel size"),
        (PLAIN, BALANCED, r"--sequence-packing-scheduler: the recipe plans one context-parallel size"),
        (with_runs(), {}, r"bins of several sizes need --hybrid-context-parallel .* --max-seqlen-per-dp-cp-rank 32"),
        (with_runs(), {"dataloader_type": "single"}, "--dataloader-type: torchmix is an external loader"),
        (with_runs(), {**HYBRID, "max_seqlen_per_dp_cp_rank": 64}, r"--max-seqlen-per-dp-cp-rank 64: .* is 32"),
        (with_runs(), {**HYBRID, "micro_batch_size": 2}, r"--micro-batch-size 2: a microbatch is a bin"),
        (with_runs(), {**DYNAMIC, "calculate_per_token_loss": False}, "--calculate-per-token-loss"),
        (with_runs(sizes=(1, 3)), HYBRID, r"no groups of 3 of the 8 ranks of dp x cp; write sizes: \[1, 2, 4, 8\]"),
        (with_runs(), {**HYBRID, "data_parallel_size": 6}, r"no groups of 8 of the 12 ranks .*: \[1, 2, 4, 12\]"),
        (with_runs(), {**DYNAMIC, "min_dynamic_context_parallel_size": 2}, r"no groups of 1 of .*: \[2, 4, 8\]"),
        (with_runs(), BALANCED, r"dp_balanced: all bins have 2 ranks there; write balance.context.sizes: \[2\]"),
    ],
)
def test_what_does_not_agree_is_named(recipe: Recipe, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check(recipe, **changes)


def test_virtual_stages_on_two_stages_are_refused() -> None:
    virtual = {"virtual_pipeline_model_parallel_size": 2}
    for recipe, flags in ((with_runs(), DYNAMIC), (with_runs(sizes=(2,)), BALANCED)):
        with pytest.raises(RecipeError, match=r"virtual stages on 2 pipeline stages: .*_communicate_shapes"):
            check(recipe, pp=2, **flags, **virtual)
        check(recipe, pp=4, **flags, **virtual)
        check(recipe, pp=2, **flags)
    check(PLAIN, pp=2, **virtual)


def test_one_size_has_megatrons_one_group() -> None:
    told = [has_several_sizes(default_args(**flags)) for flags in (HYBRID, DYNAMIC, BALANCED, {})]
    assert told == [True, True, False, False]


def test_alignment_follows_sequence_parallelism_and_fp8() -> None:
    def align(**changes: Any) -> int:
        found = recipe_for(default_args(**changes), with_runs(align=2)).balance.context
        assert found is not None
        return found.align

    assert align() == 2
    assert align(sequence_parallel=True, tensor_model_parallel_size=8) == 8
    assert align(fp8="hybrid", fp8_recipe="delayed") == 16
    assert align(fp8="e4m3", fp8_recipe="mxfp8", sequence_parallel=True, tensor_model_parallel_size=3) == 96
    assert recipe_for(default_args(), PLAIN) is PLAIN


def test_virtual_stages_have_whole_groups_of_microbatches() -> None:
    def multiple(**changes: Any) -> int:
        found = recipe_for(default_args(**changes), with_runs(microbatches_of=3)).balance.context
        assert found is not None
        return found.microbatches_of

    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert [multiple(), multiple(**stages), multiple(**stages, microbatch_group_size_per_vp_stage=4)] == [3, 6, 12]


def microbatches(*runs: tuple[range, int, int]) -> list[Microbatch]:
    """Of runs, with their step and index; the last index of a step is 1."""
    return [
        make_microbatch(cp_ranks=run, step=step, index=index, num_microbatches=2, is_last_of_step=index == 1)
        for run, step, index in runs
    ]


SEEN = ((range(2), 0, 0), (range(1, 2), 0, 1), (range(4), 1, 0), (range(2), 1, 1))


def test_a_step_is_bins_and_the_ranks_of_each() -> None:
    told: list[bytes] = []
    states = iter([b"0", b"1"])
    shared = SharedMicrobatches(
        iter(microbatches(*SEEN)),
        part="train",
        packed=True,
        by_step=True,
        num_ranks=4,
        tells_cp_size=True,
        sizes=lambda: (0, 0),
        state_of_step=lambda: next(states),
        on_step_consumed=told.append,
    )
    steps = shared.new_iterator()
    bins, groups = next(steps)
    assert [bins[number]["cp_size"] for number in (0, 1)] == [2, 1] and told == [b"0"]
    assert groups == [[[0], [0], [], []], [[], [1], [], []]]
    bins, groups = next(steps)
    assert [len(group) for group in groups[0]] == [1, 1, 1, 1] and told == [b"0", b"1"]
    with pytest.raises(StopIteration):
        next(steps)


def test_dev_is_told_how_many_microbatches_follow() -> None:
    shared = SharedMicrobatches(iter(microbatches(*SEEN)), part="train", packed=True, sizes=lambda: (300, 9000))
    chunks = [shared.new_iterator(), shared.new_iterator()]
    assert planned_step(chunks, None, 8) == (chunks, 2, 300, 9000)
    for chunk in chunks:
        assert [next(chunk)["index"] for _ in range(2)] == [0, 1]
    following = next(chunks[1]) if planned_step(chunks, None, 8)[1] == 2 else {}
    assert following["step"] == 1 and "cp_size" not in following, "of dp_balanced"


def test_a_version_without_such_schedules_is_named() -> None:
    with installed(default_args(), core=True) as modules:
        training = modules["megatron.training.training"]
        take_over("microbatches")
        assert training.wrap_data_iterator is planned_step
        del training.wrap_data_iterator
        with pytest.raises(RecipeError, match=r"this Megatron has no megatron\.training\.training\.wrap_data_iterator"):
            take_over("microbatches")
