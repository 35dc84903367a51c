"""One rank's decisions: a policy observes losses, is asked at its steps, and its answers are logged.

In: losses of each step, reduced over all ranks. Out: a record a step, in the log. Must hold: the policy is told
exactly what the log holds, so that a resume, which feeds it the log, finds it as it was; a policy that fails changes no
share where the recipe says `on_error: keep`. Cost: the policy's own, and one line of the log a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

import numpy as np

from torchmix.errors import PlanError
from torchmix.mixture.policies.limits import within
from torchmix.mixture.policies.log import LogWriter, StepRecord
from torchmix.mixture.policies.policy import Policy
from torchmix.mixture.shares.integers import integer_shares

logger = logging.getLogger(__name__)


class Decider:
    """Holds the policy; see the file."""

    def __init__(
        self,
        policy: Policy,
        log: LogWriter,
        *,
        name: str,
        planned: Callable[[int], Mapping[str, Fraction]],
        every: int,
        lowest: float,
        highest: float,
        keep_on_error: bool,
        earlier: Iterable[StepRecord] = (),
    ) -> None:
        """Start the policy, and tell it what the log holds.

        Args:
            policy: What decides.
            log: Where decisions go.
            name: The policy's, for messages.
            planned: Step -> the schedule's share of each child in the group; they sum to 1.
            every: Steps from one decision to the next.
            lowest, highest: See `limits.within`.
            keep_on_error: A policy that fails changes nothing and is logged; else its failure is raised.
            earlier: Records of the run so far.
        """
        self._policy, self._log, self._name, self._planned = policy, log, name, planned
        self._every, self._lowest, self._highest = every, lowest, highest
        self._keep_on_error = keep_on_error
        shares = {child: float(share) for child, share in planned(0).items()}
        self._names = sorted(shares)
        policy.start(self._names, shares)
        for record in earlier:
            self._replay(record)

    def is_decision(self, step: int) -> bool:
        """Whether shares are decided after this step."""
        return (step + 1) % self._every == 0

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> StepRecord:
        """Tell the policy the losses of a step, ask it where one is decided, and log both.

        Args:
            step: One more than in the call before.
            losses: Of children with tokens in the step: summed loss, and number of tokens.

        Raises:
            PlanError: The policy failed, and the recipe says `on_error: stop`.
        """
        shares, fault = self._ask(step, losses)
        record = StepRecord(step=step, losses=dict(losses), shares=shares, fault=fault)
        self._log.append(record, to_disk=self.is_decision(step))
        return record

    def _ask(self, step: int, losses: Mapping[str, tuple[float, int]]) -> tuple[dict[str, int] | None, str]:
        try:
            self._policy.observe(step, losses)
            wanted = self._policy.decide(step) if self.is_decision(step) else None
            return (None if wanted is None else self._bounded(wanted, step)), ""
        except Exception as error:  # a user's own code may raise anything
            fault = f"policy {self._name!r} after step {step}: {type(error).__name__}: {error}"
            if not self._keep_on_error:
                raise PlanError(f"{fault}; mend it, or let the recipe say `on_error: keep`") from error
            logger.warning("%s; the shares stay as they are", fault)
            return None, fault[:2000]

    def _bounded(self, wanted: Mapping[str, float], step: int) -> dict[str, int]:
        strange = sorted(set(wanted) ^ set(self._names))
        if strange:
            raise ValueError(f"it gives shares of {sorted(wanted)}, the group has {self._names}")
        for child, share in wanted.items():
            if not math.isfinite(share) or share < 0:
                raise ValueError(f"the share of {child!r} is {share}")
        values = np.array([float(wanted[child]) for child in self._names])
        if not values.sum() > 0:
            raise ValueError("all its shares are 0")
        planned = self._planned(step)
        base = np.array([float(planned[child]) for child in self._names])
        bounded = within(values, base, lowest=self._lowest, highest=self._highest)
        exact = {child: Fraction(share) for child, share in zip(self._names, bounded.tolist(), strict=True)}
        return dict(zip(self._names, integer_shares(exact).tolist(), strict=True))

    def _replay(self, record: StepRecord) -> None:
        """What was said already is not said again; a policy that failed then may fail again."""
        try:
            self._policy.observe(record.step, record.losses)
            if self.is_decision(record.step):
                self._policy.decide(record.step)
        except Exception as error:  # as above
            if not self._keep_on_error:
                raise PlanError(
                    f"policy {self._name!r}, told the log again, fails at step {record.step}: {error}"
                ) from error
