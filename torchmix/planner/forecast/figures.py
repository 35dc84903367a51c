"""What each source will give in N steps, as numbers.

In: what planning ahead has found. Out: `Forecast`. Must hold: it says which of its numbers are exact. Cost: none.
"""

from __future__ import annotations

import msgspec

LOW_FILL = 0.8
"""A batch that is filled by less is a finding."""
SIMULATED_STEPS = 1000
"""Steps that are planned in full before rates take over."""


class SourceForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One source over N steps."""

    name: str
    share: float
    """Part of the trained tokens, as the recipe has it."""
    epoch_tokens: int
    """Tokens that one epoch gives, after the recipe's overflow rule."""
    first_step: int | None
    """Step of its first token, estimated also beyond N; None if the data ends before."""
    delivered_tokens: int
    """Tokens that it gives in all N steps, or until the data ends."""
    epochs: float
    """Passes over the source until then."""
    runs_out_step: int | None
    """First step that asks for more than `max_epochs`; None if there is none in N steps."""
    most_repeats: int
    """Most times that one document came in one of the simulated steps."""
    deviation: float
    """By how much its part of a step differs from its share, over the share: mean of the simulated steps before any
    source ran out."""
    piece_tokens: float
    """Tokens of a piece, mean of those delivered in the simulated steps; 0 if there are none."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A run of N steps."""

    num_steps: int
    simulated_steps: int
    """The first steps, for which every number is exact."""
    stop_step: int | None
    """Step that cannot be planned, because a source ran out and the recipe says `error`, or all did."""
    stop_is_exact: bool
    """The planner itself came to `stop_step`."""
    capacity_tokens: int
    """Tokens that a step has room for, mean of all N."""
    fill: float
    """Tokens over capacity, mean of the simulated steps."""
    lowest_fill: float
    """The fill of the simulated step with the fewest tokens."""
    lowest_fill_step: int
    num_low_fills: int
    """Simulated steps below `LOW_FILL`."""
    alignment: float
    """Tokens of all documents drawn in the simulated steps over what they take when rounded up to `align_tokens`."""
    sources: tuple[SourceForecast, ...]
    """By sorted name; without cells that have no rows."""
    begun: tuple[int | None, ...]
    """First step of each change of the schedule that begins at an epoch, in their order; None: not in N steps."""

    def is_exact(self, step: int) -> bool:
        """What happens in this step was planned, not estimated."""
        return step < self.simulated_steps or (self.stop_is_exact and step == self.stop_step)
