"""What a policy observes, and what it answers.

In: names and shares at the start, then sums of losses by step. Out: shares, or none. Must hold: a policy is a function
of what it observed, in that order, and keeps nothing else: fed the same records again, it answers the same. One rank
asks it; its answers are logged, and everyone else reads the log. Cost: that of the policy, once every `every` steps,
beside training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Policy(Protocol):
    """Decides the shares of the children of one group of the mixture."""

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """Begin.

        Args:
            names: The children, sorted; they stay the same until the next `start`.
            shares: The share of each in the group, above 0; they sum to 1.
        """

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """Take what a step has shown.

        Args:
            step: From 0, ascending; steps may be missing.
            losses: Of each child that had tokens in the step, the sum of the losses of its tokens (nats) and their
                number, 1 or more.
        """

    def decide(self, step: int) -> Mapping[str, float] | None:
        """The shares from now on, not negative, of any positive sum; None: as they are.

        Args:
            step: The last step that was observed, or a later one.
        """
