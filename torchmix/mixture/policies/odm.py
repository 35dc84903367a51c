"""Online Data Mixing: a bandit whose arms are the sources and whose reward is the loss.

In: losses by step. Out: shares. Must hold: see `policy.Policy`. Cost: an exponential of each source.

Source: Albalak, Pan, Raffel, Wang: Efficient Online Data Mixing for Language Model Pre-Training (arXiv 2312.02406), on
Exp3 of Auer et al. (2002), with the choices of the authors' code: losses count a tenth, and each is divided by the
share that its source had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

LOSS_SCALE = 10.0


class Odm:
    """See the file."""

    def __init__(self, *, warmup_steps: int = 0) -> None:
        """Nothing is decided, and nothing learnt, up to and including step `warmup_steps`."""
        self._warmup_steps = warmup_steps

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `policy.Policy.start`."""
        self._names = list(names)
        self._shares = np.array([shares[name] for name in names])
        self._rewards = np.zeros(len(names))
        self._explore = self._explore_before = 1 / len(names)
        self._has_news = False

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """See `policy.Policy.observe`; the mean loss of a source is its reward, by the shares decided last."""
        if step < self._warmup_steps or not losses:
            return
        for i, name in enumerate(self._names):
            if name in losses:
                loss_sum, num_tokens = losses[name]
                self._rewards[i] += loss_sum / num_tokens / LOSS_SCALE / max(self._shares[i], 1e-12)
        count = len(self._names)
        self._explore_before = self._explore
        self._explore = min(1 / count, math.sqrt(math.log(count) / (count * (step + 1))))
        self._has_news = True

    def decide(self, step: int) -> Mapping[str, float] | None:
        """See `policy.Policy.decide`."""
        if not self._has_news or len(self._names) < 2:
            return None
        exponents = self._rewards * self._explore_before
        weights = np.exp(exponents - exponents.max())  # less its maximum: the ratios stay, and nothing overflows
        shares = (1 - len(weights) * self._explore) * weights / weights.sum() + self._explore
        self._shares = shares / shares.sum()
        self._has_news = False
        return dict(zip(self._names, self._shares.tolist(), strict=True))
