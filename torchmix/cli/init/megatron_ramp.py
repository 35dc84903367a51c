"""Megatron's flags of the global batch -> `batch.samples` of a recipe.

In: `--global-batch-size` with `--rampup-batch-size`, or `--step-batch-size-schedule`. Out: a number, or stages by step.
Must hold: every step has as many samples as Megatron's calculator gives it. Cost: one pass over the stages, and none
over steps.

The rules are those of `RampupBatchsizeNumMicroBatchesCalculator` (core 0.16) and of
`StepBatchsizeNumMicroBatchesCalculator` (core 0.20) in megatron/core/num_microbatches_calculator.py of Megatron-LM: the
size of a step follows from the samples consumed before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchmix.errors import OptionError

MULTIPLES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

Stage = tuple[int, int]
"""First step, samples of a step."""


def ramp_stages(start: int, increment: int, ramp_samples: int, samples: int) -> list[Stage]:
    """Stages of `--rampup-batch-size START INCREMENT SAMPLES`.

    Args:
        start: Samples of the first step.
        increment: What each stage adds.
        ramp_samples: Samples over which the size grows.
        samples: `--global-batch-size`.

    Raises:
        OptionError: Megatron refuses these numbers.
    """
    flag = f"--rampup-batch-size {start} {increment} {ramp_samples}"
    if start < 1 or increment < 1 or ramp_samples < 0:
        raise OptionError(f"{flag}: start and increment are at least 1, samples at least 0")
    if samples < start or (samples - start) % increment:
        raise OptionError(f"{flag}: {increment} does not lead from {start} to --global-batch-size {samples}")
    if samples == start or ramp_samples == 0:
        return [(0, samples)]
    num_increments = (samples - start) // increment
    per_increment = ramp_samples / num_increments  # a double, as Megatron has it
    borders = [(0, start)]
    for number in range(1, num_increments + 1):
        consumed = math.floor(number * per_increment)  # or one beside it, as the division rounds
        while consumed <= ramp_samples and int(consumed / per_increment) < number:
            consumed += 1
        borders.append((consumed, start + number * increment))
    return _stages(borders)


def schedule_stages(schedule: str, seq_length: int) -> list[Stage]:
    """Stages of `--step-batch-size-schedule "TOKENS:SIZE TOKENS:SIZE ..."`; tokens and sizes may end in K, M, B or T.

    Raises:
        OptionError: Not such a schedule.
    """
    flag = f"--step-batch-size-schedule {schedule!r}"
    try:
        pairs = [entry.split(":", 1) for entry in schedule.replace(",", " ").split()]
        borders = sorted((_count(tokens) // seq_length, _count(size)) for tokens, size in pairs)
    except ValueError:
        raise OptionError(f'{flag} is no schedule, as "0:768 250B:1536"') from None
    befores = [before for before, _ in borders]
    if not borders or befores[0] != 0 or len(set(befores)) < len(befores) or min(size for _, size in borders) < 1:
        raise OptionError(f"{flag}: the first begins at 0, the next ones after it, and sizes are at least 1")

    return _stages(borders)


def _stages(borders: Sequence[tuple[int, int]]) -> list[Stage]:
    """Stages by step, from (samples consumed, size from there on), ascending; the first is at 0."""
    stages: list[Stage] = []
    step = consumed = 0
    for number, (_, size) in enumerate(borders):
        until = borders[number + 1][0] if number + 1 < len(borders) else consumed
        if number + 1 < len(borders) and until <= consumed:
            continue  # the size before has stepped over this one
        if not stages or stages[-1][1] != size:
            stages.append((step, size))
        steps = -(-(until - consumed) // size)
        step, consumed = step + steps, consumed + steps * size
    return stages


def _count(text: str) -> int:
    unit = text.strip().upper()[-1:]
    return int(float(text.strip()[:-1]) * MULTIPLES[unit]) if unit in MULTIPLES else int(float(text))
