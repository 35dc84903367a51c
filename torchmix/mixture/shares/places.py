"""The changes of a schedule, some of which begin at an epoch of a stream -> where each lies in the run.

In: the stages of a schedule; which of those at an epoch have begun, as a run has logged it. Out: the tokens where each
stage begins and ends; the stages that are due. Must hold: where a stage at an epoch begins follows from the position of
its stream alone, and once logged it never moves; a stage that begins overtakes all before it that have not begun, since
its shares follow from theirs. Cost: some operations a stage, in steps in which one begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchmix.recipe.mixture.changes import Stage
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.structs import Batch


class BegunStage(NamedTuple):
    """A stage at an epoch that has begun."""

    of: str
    """The stream, and its whole epochs, at which the stage begins."""
    epochs: int
    step: int
    """The first step of the stage."""


Begun = tuple[BegunStage, ...]
"""In the order in which they began."""
NONE_BEGUN: Begun = ()


class StagePlaces:
    """Where the stages of a schedule lie."""

    def __init__(self, stages: Sequence[Stage], batch: Batch) -> None:
        """Take the stages of a recipe, and its batch, for places in steps."""
        self._stages, self._batch = stages, batch
        self.have_epochs = any(stage.epoch is not None for stage in stages)
        """Whether some stage begins at an epoch."""
        self.streams = tuple(sorted({stage.epoch.of for stage in stages if stage.epoch is not None}))
        """Those whose epochs count."""

    def due(self, step: int, begun: Begun, epochs: Mapping[str, int]) -> Begun:
        """The stages that begin with a step, in their order.

        Args:
            step: From 0.
            begun: What has begun before.
            epochs: Whole epochs that each stream has given before the step.
        """
        if not self.have_epochs:
            return ()
        last = max(self.steps_of(begun), default=-1)
        last = max(last, self._last_by_tokens(step))
        return tuple(
            BegunStage(stage.epoch.of, stage.epoch.epochs, step)
            for stage in self._stages[last + 1 :]
            if stage.epoch is not None and epochs[stage.epoch.of] >= stage.epoch.epochs
        )

    def at(self, begun: Begun) -> list[tuple[int, int] | None]:
        """Tokens where each stage begins, and where its shares are reached; None of one that has not begun."""
        steps = self.steps_of(begun)
        places: list[tuple[int, int] | None] = []
        end = 0  # of the stage before: no stage begins inside another one
        for number, stage in enumerate(self._stages):
            start, stop = stage.start_token, stage.stop_token
            if stage.epoch is not None:
                if number not in steps:
                    places.append(None)
                    continue
                start = tokens_before(self._batch, steps[number])
                stop = tokens_before(self._batch, steps[number] + stage.ramp_steps) + stage.ramp_tokens
                stop += max(start, end) - start
            start = max(start, end)
            end = max(start, stop)
            places.append((start, end))
        return places

    def steps_of(self, begun: Begun) -> dict[int, int]:
        """The number of each stage at an epoch that has begun, and its first step."""
        return {number: one.step for number, one in self._found(begun)}

    def still_begun(self, begun: Begun) -> Begun:
        """What of the begun stages of another schedule this one still has: a stage at the same epoch of the same
        stream, which no stage behind it has overtaken. Its shares and its ramp may be others.
        """
        return tuple(one for _, one in self._found(begun))

    def _found(self, begun: Begun) -> list[tuple[int, BegunStage]]:
        """The number of the stage that each is; those that are none are left out."""
        found: list[tuple[int, BegunStage]] = []
        last = -1
        for one in begun:
            last = max(last, self._last_by_tokens(one.step))
            for number in range(last + 1, len(self._stages)):
                epoch = self._stages[number].epoch
                if epoch is not None and (epoch.of, epoch.epochs) == (one.of, one.epochs):
                    found.append((number, one))
                    last = number
                    break
        return found

    def stage_of(self, number: int) -> Stage:
        """A stage by its number."""
        return self._stages[number]

    def _last_by_tokens(self, step: int) -> int:
        """The number of the last stage with a place in tokens that has begun before a step; -1: none has."""
        tokens = tokens_before(self._batch, step)
        numbers = (n for n, stage in enumerate(self._stages) if stage.epoch is None and stage.start_token <= tokens)
        return max(numbers, default=-1)
