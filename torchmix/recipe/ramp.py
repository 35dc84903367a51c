"""The size of the global batch over steps, and of its samples: constant, or in stages.

Exact integers, from the step alone: no rank, no history. Cost: one pass over the stages.

Megatron ramps by consumed samples (`--rampup-batch-size START INCREMENT SAMPLES`); a ramp by steps is the same once its
borders are counted in steps, and it needs no division of the borders by the size.
"""

from __future__ import annotations

from torchmix.errors import RecipeError
from torchmix.recipe.structs import Batch, RampStage, Recipe


def stages_of(batch: Batch) -> tuple[RampStage, ...]:
    """The stages, in order, each with its length, without those that change nothing; one where all is constant."""
    if isinstance(batch.samples, int):
        return (RampStage(from_step=0, samples=batch.samples, length=batch.length),)
    stages: list[RampStage] = []
    length = batch.length
    for stage in batch.samples:
        length = stage.length or length
        if not stages or (stages[-1].samples, stages[-1].length) != (stage.samples, length):
            stages.append(RampStage(from_step=stage.from_step, samples=stage.samples, length=length))
    return tuple(stages)


def samples_of_step(batch: Batch, step: int) -> int:
    """Samples of the global batch of a step, from 0."""
    if isinstance(batch.samples, int):  # asked for several times a step
        return batch.samples
    return next(stage.samples for stage in reversed(stages_of(batch)) if stage.from_step <= step)


def fixed_microbatches(recipe: Recipe, *, dp: int, micro_batch_size: int = 1) -> int:
    """Microbatches of each rank in every step, for a trainer that accumulates a fixed number of them.

    Args:
        recipe: Of the run.
        dp: Data-parallel ranks.
        micro_batch_size: Samples of a microbatch.

    Raises:
        RecipeError: Steps differ: the batch ramps, or each step has as many microbatches as its plan says.
    """
    if recipe.balance.context is not None:
        message = (
            "each step has as many microbatches as its plan says, and this trainer accumulates a fixed number; use "
            "packing.method: best_fit, or a loop that ends a step at microbatch.is_last_of_step"
        )
        raise RecipeError(message, "balance.context")
    if not isinstance(recipe.batch.samples, int):
        message = "ramps, and this trainer accumulates a fixed number of microbatches; give one number of samples"
        raise RecipeError(message, "batch.samples")
    return recipe.batch.samples // (dp * micro_batch_size)


def length_of_step(batch: Batch, step: int) -> int:
    """Tokens of a sample of a step, from 0."""
    if isinstance(batch.samples, int):
        return batch.length
    return next(length_of(batch, stage) for stage in reversed(stages_of(batch)) if stage.from_step <= step)


def length_of(batch: Batch, stage: RampStage) -> int:
    """Tokens of a sample in one of `stages_of`."""
    return stage.length or batch.length


def samples_before(batch: Batch, step: int) -> int:
    """Samples of all steps before `step`: what Megatron calls consumed samples."""
    stages = stages_of(batch)
    stops = [*(stage.from_step for stage in stages[1:]), step]
    return sum(
        max(0, min(stop, step) - stage.from_step) * stage.samples for stage, stop in zip(stages, stops, strict=True)
    )


def tokens_before(batch: Batch, step: int) -> int:
    """Tokens of all steps before `step`, padding included: samples x length, as Megatron counts consumed samples."""
    stages = stages_of(batch)
    stops = [*(stage.from_step for stage in stages[1:]), step]
    return sum(
        max(0, min(stop, step) - stage.from_step) * stage.samples * length_of(batch, stage)
        for stage, stop in zip(stages, stops, strict=True)
    )


def step_after_samples(batch: Batch, consumed: int) -> int:
    """The step that follows exactly `consumed` samples.

    Raises:
        RecipeError: There is none: the count is negative or lies inside a step.
    """
    if consumed < 0:
        raise RecipeError(f"{consumed} consumed samples: a count of samples is at least 0", "batch.samples")
    stages = stages_of(batch)
    stage = next(stage for stage in reversed(stages) if samples_before(batch, stage.from_step) <= consumed)
    steps, inside = divmod(consumed - samples_before(batch, stage.from_step), stage.samples)
    step = stage.from_step + steps
    if inside:
        raise RecipeError(
            f"{consumed} consumed samples end inside step {step}, which is samples {consumed - inside} to "
            f"{consumed - inside + stage.samples}; they were counted with another batch size or ramp",
            "batch.samples",
        )
    return step


def most_samples(batch: Batch) -> int:
    """Samples of the largest global batch."""
    return max(stage.samples for stage in stages_of(batch))


def lengths_of(batch: Batch) -> tuple[int, ...]:
    """Tokens of a sample in all stages, ascending, each once."""
    return tuple(sorted({length_of(batch, stage) for stage in stages_of(batch)}))


def most_length(batch: Batch) -> int:
    """Tokens of the longest sample."""
    return lengths_of(batch)[-1]


def most_tokens(batch: Batch) -> int:
    """Tokens of the largest global batch."""
    return max(stage.samples * length_of(batch, stage) for stage in stages_of(batch))


def last_samples(batch: Batch) -> int:
    """Samples of the global batch after the last change."""
    return stages_of(batch)[-1].samples
