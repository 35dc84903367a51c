"""Runs of ranks under Megatron's own context parallelism of several sizes: its two ways, and what they ask of a recipe.

    version            flags                                                  what takes the bins of a step
    core 0.16 to main  --hybrid-context-parallel                              its schedule for a pipeline of one stage
    dev                --dynamic-context-parallel                             any schedule, microbatch by microbatch
                       --sequence-packing-scheduler default_dynamic_cp
    dev                --sequence-packing-scheduler dp_balanced               the same, with runs of `cp` ranks alone

In each, Megatron would read samples, gather their lengths, plan, and send samples from rank to rank. Here the plan is
made, and each rank has its part: what would read takes the loader's microbatches as they are. Groups of processes,
schedules and the barriers in them stay Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from msgspec.structs import replace

from torchmix.parallel.place_tree import powers_up_to
from torchmix.recipe.structs import Context, Recipe

Way = Literal["steps", "microbatches"]
"""What Megatron takes at a time: with --hybrid-context-parallel whole steps."""

FLAGS = "--hybrid-context-parallel (core 0.16 to main) or --dynamic-context-parallel (dev)"


def way_of(args: Any) -> Way | None:
    """The way that Megatron's arguments ask for; None: neither."""
    if getattr(args, "sequence_packing_scheduler", None) or getattr(args, "dynamic_context_parallel", False):
        return "microbatches"
    return "steps" if getattr(args, "hybrid_context_parallel", False) else None


def has_several_sizes(args: Any) -> bool:
    """Whether bins differ in their ranks; where they do not, Megatron has its one context-parallel group alone."""
    return way_of(args) is not None and getattr(args, "sequence_packing_scheduler", None) != "dp_balanced"


def conflicts_of_runs(args: Any, recipe: Recipe, *, cp: int, pp: int) -> Iterator[str]:
    """What of a recipe with runs of ranks contradicts Megatron's arguments, or of arguments a recipe without."""
    way, context = way_of(args), recipe.balance.context
    if context is None:
        if way is not None:
            yield (
                f"{_name(args)}: the recipe plans one context-parallel size; write packing.method: whole and "
                f"balance.context, or leave the flag out"
            )
        return
    if way is None:
        yield (
            f"balance.context: bins of several sizes need {FLAGS}; give it, with --max-seqlen-per-dp-cp-rank "
            f"{context.rank_tokens} --dataloader-type single --calculate-per-token-loss --micro-batch-size 1"
        )
        return
    if getattr(args, "max_seqlen_per_dp_cp_rank", None) != context.rank_tokens:
        yield (
            f"--max-seqlen-per-dp-cp-rank {getattr(args, 'max_seqlen_per_dp_cp_rank', None)}: "
            f"balance.context.rank_tokens of the recipe is {context.rank_tokens}; give the same"
        )
    if args.micro_batch_size != 1:
        yield f"--micro-batch-size {args.micro_batch_size}: a microbatch is a bin of any number of documents; give 1"
    if not getattr(args, "calculate_per_token_loss", False):
        yield "bins differ in tokens, so a mean by microbatch would weight tokens unequally; --calculate-per-token-loss"
    if pp == 2 and getattr(args, "virtual_pipeline_model_parallel_size", None) is not None:
        yield (
            "virtual stages on 2 pipeline stages: each is the other's neighbour on both sides, and Megatron "
            "(P2PCommunicator._communicate_shapes) then takes the shape from one side for that of the other; bins "
            "differ in shape; use 4 pipeline stages, or no virtual ones"
        )
    yield from _sizes_without_group(args, context, cp=cp)


def _sizes_without_group(args: Any, context: Context, *, cp: int) -> Iterator[str]:
    """Runs for which Megatron makes no group of processes."""
    num_ranks = args.data_parallel_size * cp
    if not has_several_sizes(args):
        if context.sizes != (cp,):
            yield (
                f"--sequence-packing-scheduler dp_balanced: all bins have {cp} ranks there; write balance.context."
                f"sizes: [{cp}], or give --dynamic-context-parallel"
            )
        return
    least = getattr(args, "min_dynamic_context_parallel_size", 1) or 1
    sizes = powers_up_to(num_ranks) if context.sizes is None else [n for n in context.sizes if n <= num_ranks]
    odd = [size for size in sizes if size != num_ranks and (size & (size - 1) or 2 * size > num_ranks or size < least)]
    if odd or (num_ranks % 2 and num_ranks > 1):
        there = [size for size in powers_up_to(num_ranks) if least <= size and (2 * size <= num_ranks)]
        yield (
            f"balance.context.sizes: Megatron has no groups of {', '.join(map(str, odd)) or num_ranks} of the "
            f"{num_ranks} ranks of dp x cp; write sizes: {[*there, num_ranks]}, and use an even number of ranks"
        )


def _name(args: Any) -> str:
    names = ("dynamic_context_parallel", "hybrid_context_parallel", "sequence_packing_scheduler")
    return next(f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None))


def recipe_for(args: Any, recipe: Recipe) -> Recipe:
    """The recipe with what Megatron's arguments ask of bins; it changes placements, and no order.

    Sequence parallelism cuts a rank's tokens once more, FP8 multiplies matrices of multiples of 16 or 32 tokens, and
    virtual stages take microbatches in groups.
    """
    context = recipe.balance.context
    if context is None:
        return recipe
    align = context.align
    if getattr(args, "sequence_parallel", False):
        align = math.lcm(align, args.tensor_model_parallel_size)
    if getattr(args, "fp8", None):
        align = math.lcm(align, 32 if getattr(args, "fp8_recipe", None) == "mxfp8" else 16)
    changes: dict[str, Any] = {"align": align}
    if getattr(args, "virtual_pipeline_model_parallel_size", None) is not None:
        group = getattr(args, "microbatch_group_size_per_vp_stage", None) or args.pipeline_model_parallel_size
        changes["microbatches_of"] = math.lcm(context.microbatches_of, group)
    return replace(recipe, balance=replace(recipe.balance, context=replace(context, **changes)))
