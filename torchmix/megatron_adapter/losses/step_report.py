"""The losses of each step, told to the recipe's policy.

In: sums of loss and tokens by source of each microbatch, on the ranks of the last stage. Out: one report a step, when
its last microbatch has its loss. Must hold: each step is told once and in order, also where Megatron computes a step
twice or passes over it. Cost: the host waits for the loss of the last microbatch of each step; 16 bytes a source are
copied, and the report's own collective is between the same ranks, and at the same place, as Megatron's sum of its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from torchmix.errors import PlanError

Report = Callable[[int, Mapping[str, tuple[float, int]]], None]
"""`loader.report`."""


class StepReports:
    """Tells the losses of steps; a run that goes on with a later step tells those from there on."""

    def __init__(self, names: Sequence[str], report: Report) -> None:
        """Begin.

        Args:
            names: Sources, as `source_index` counts them.
            report: Called once a step.
        """
        self._names, self._report = names, report
        self._sums: torch.Tensor | None = None
        self._last_told = -1

    def add(self, sums: torch.Tensor, *, step: int, is_first_of_step: bool, is_last_of_step: bool) -> None:
        """Count a microbatch.

        Args:
            sums: float [2, sources]: summed losses, tokens.
            step: Of the microbatch; one that was told already is computed again, and says nothing new.
            is_first_of_step, is_last_of_step: Where it stands in its step.

        Raises:
            PlanError: The step's first microbatch had no loss on this rank.
        """
        if step <= self._last_told:
            return
        if is_first_of_step:
            self._sums = sums.double()
        elif self._sums is None:
            raise PlanError(
                f"the policy of the recipe needs all losses of step {step}, and its first microbatches had none; give "
                f"each microbatch to the script's loss_func"
            )
        else:
            self._sums = self._sums + sums
        if is_last_of_step:
            totals, tokens = self._sums.tolist()
            self._sums = None
            values = zip(self._names, totals, tokens, strict=True)
            self._tell(step, {name: (total, round(count)) for name, total, count in values if count > 0})

    def skip(self, step: int) -> None:
        """Tell that a step was passed over: nobody has losses of it."""
        if step > self._last_told:
            self._tell(step, {})

    def _tell(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        self._report(step, losses)
        self._last_told = step
