"""Adaptive Data Optimization: more of the sources whose loss still falls, judged by a curve through each one's losses.

In: losses by step. Out: shares. Must hold: see `policy.Policy`. Cost: a fit of every curve each `refit_steps`, some 30
ms a source; else some array operations.

Source: Jiang, Zhou, Feng, Malladi, Kolter: Adaptive Data Optimization: Dynamic Sample Selection with Scaling Laws
(arXiv 2410.11820), with the choices of the authors' code (yidingjiang/ado): its smoothing, its floor of 1 % and its
constants. A share is proportional to prior x slope of the curve x sqrt(h), where h is a moving average of what was
seen. Three things differ from that code. Losses and h count tokens, not samples. The first fit is at `start_step`, not
at the next multiple of `refit_steps`. Between two decisions the last one enters the average of shares once a step.
`limits.with_floor` and `scaling_law` name their own differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchmix.mixture.policies.limits import with_floor
from torchmix.mixture.policies.scaling_law import fit_scaling_law, smoothed

SEEN_MEMORY = 0.9
"""The part of the moving average of what was seen that a step keeps."""
SHARE_MEMORY = 0.9
"""What the average of all earlier shares has in the next one."""
FLOOR = 0.01
LOWEST_EXPONENT = 0.05
TOKENS_OF_UNIT = 1024
"""The bounds of the curve's parameters are for samples of this many tokens."""


class Ado:
    """See the file. Every constant is in steps of the run."""

    def __init__(self, *, ignore_steps: int = 500, start_step: int = 1000, refit_steps: int = 1000, every: int = 10):
        """Take the constants.

        Args:
            ignore_steps: Losses of the first steps are no part of a curve.
            start_step: Nothing is decided before this step.
            refit_steps: The curves are fitted again after so many steps.
            every: A curve goes through one loss of so many steps.
        """
        self._ignore_steps, self._start_step = ignore_steps, max(start_step, ignore_steps + 4)
        self._refit_steps, self._every = refit_steps, every

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `policy.Policy.start`; the shares are the prior."""
        self._names = list(names)
        self._place = {name: i for i, name in enumerate(names)}
        self._prior = np.array([shares[name] for name in names])
        self._average, self._seen = self._prior.copy(), self._prior.copy()
        self._tokens: list[float] = []
        self._losses: list[NDArray[np.float64]] = []
        self._curves: NDArray[np.float64] | None = None
        self._next_fit = self._start_step
        self._last_decision: int | None = None

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """See `policy.Policy.observe`; a source without tokens keeps its last loss."""
        counts, means = np.zeros(len(self._names)), np.full(len(self._names), np.nan)
        for name, (loss_sum, num_tokens) in losses.items():
            counts[self._place[name]] = num_tokens
            means[self._place[name]] = loss_sum / num_tokens
        if not counts.any():
            return
        before = self._losses[-1] if self._losses else np.full(len(means), np.nansum(means * counts) / counts.sum())
        self._losses.append(np.where(np.isnan(means), before, means))
        self._tokens.append(counts.sum() / TOKENS_OF_UNIT)
        self._seen = SEEN_MEMORY * self._seen + (1 - SEEN_MEMORY) * counts / counts.sum()

    def decide(self, step: int) -> Mapping[str, float] | None:
        """See `policy.Policy.decide`."""
        if step < self._start_step or len(self._losses) <= self._ignore_steps + 3:
            return None
        if step >= self._next_fit:
            self._curves = self._fit()
            self._next_fit = step + self._refit_steps
        assert self._curves is not None, "the first decision fits the curves"
        a, _, alpha = self._curves.T
        seen = float(sum(self._tokens))
        alpha = np.maximum(alpha, LOWEST_EXPONENT)
        slope = alpha * np.exp(a) / seen ** self._curves[:, 2] / seen
        wanted = slope * self._prior * np.sqrt(self._seen)
        if not wanted.sum() > 0:
            return None
        now = with_floor(wanted / wanted.sum(), FLOOR)
        shares = SHARE_MEMORY * self._average + (1 - SHARE_MEMORY) * now
        elapsed = 1 if self._last_decision is None else step - self._last_decision
        self._average += (now - self._average) * elapsed / (step + 1)
        self._last_decision = step
        return dict(zip(self._names, shares.tolist(), strict=True))

    def _fit(self) -> NDArray[np.float64]:
        """[n, 3] the curve of each source; all have seen the same tokens, so that learning from others counts."""
        seen = np.cumsum(self._tokens)[self._ignore_steps :: self._every]
        losses = np.stack(self._losses)
        return np.array(
            [
                fit_scaling_law(seen, np.maximum(smoothed(column)[self._ignore_steps :: self._every], 1e-3))
                for column in losses.T
            ]
        )
