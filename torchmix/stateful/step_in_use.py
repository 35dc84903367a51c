"""The step that is being consumed, and the iterator over microbatches that the user holds.

In: a step that has arrived. Out: its microbatches, one after the other. Must hold: the iterator stays valid: it goes on
when the loader goes on, after an end, an error or a loaded state. Cost: none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from torchmix.constructor.fields import Microbatch
from torchmix.steps.boundary import Boundary, whole
from torchmix.steps.header import StepHeader
from torchmix.steps.state import LoaderState


class StepInUse(msgspec.Struct, eq=False):
    """A step that is being consumed. A microbatch changes only this object of the loader."""

    microbatches: list[Microbatch]
    header: StepHeader
    state_after: Boundary
    num_used: int
    """Microbatches handed out, including those before a state that was loaded inside the step."""

    def state_within(self, before: LoaderState | Boundary) -> LoaderState:
        """The state after the microbatches handed out; `before`: the one that the step began with."""
        if self.num_used <= before.microbatch:
            return whole(before)
        return msgspec.structs.replace(whole(before), microbatch=self.num_used, plan_digest=self.header.plan_digest)


class Microbatches:
    """An iterator over what a loader gives next."""

    def __init__(self, take: Callable[[], Microbatch | None]) -> None:
        """`take` gives the next microbatch, or None at the end."""
        self._take = take

    def __iter__(self) -> Microbatches:
        return self

    def __next__(self) -> Microbatch:
        microbatch = self._take()
        if microbatch is None:
            raise StopIteration
        return microbatch
