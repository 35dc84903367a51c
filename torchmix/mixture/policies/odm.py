"""Bandits whose arms are the sources and whose reward is the loss: Online Data Mixing, and Exp3, which it came from.

In: losses by step. Out: shares. Must hold: see `policy.Policy`. Cost: an exponential of each source.

Source: Albalak, Pan, Raffel, Wang: Efficient Online Data Mixing for Language Model Pre-Training (arXiv 2312.02406), and
their code (alon-albalak/online-data-mixing). It has several methods, and names `SmoothedMeanWeightUpdater` as the
paper's; `Odm` is its `group_update`. `Exp3` is the `group_update` of `Exp3WeightUpdater`, after Auer, Cesa-Bianchi,
Freund, Schapire: The Nonstochastic Multiarmed Bandit Problem (2002). With K sources, both mix what they prefer with

    e(t) = min(1 / K, sqrt(ln K / (K t)))

of every source, so shares are equal in the first K ln K steps. Both differ from the authors' code in two ways: a step
between two decisions is learnt from too, and logarithms keep large losses from overflowing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

LOSS_SCALE = 10.0
"""By which Exp3 divides losses, so that its sums stay small."""


class _Bandit:
    """What both share: the steps that count, and how much of every source is explored."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `policy.Policy.start`."""
        self._names = list(names)
        self._shares = np.array([shares[name] for name in names])
        self._explore = self._explore_before = 1 / len(names)
        self._has_news = False

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """See `policy.Policy.observe`; the mean loss of a source is its reward."""
        if step < self._warmup_steps or not losses:
            return
        for i, name in enumerate(self._names):
            if name in losses:
                loss_sum, num_tokens = losses[name]
                self._learn(i, loss_sum / num_tokens)
        count = len(self._names)
        self._explore_before = self._explore
        self._explore = min(1 / count, math.sqrt(math.log(count) / (count * (step + 1))))
        self._has_news = True

    def decide(self, step: int) -> Mapping[str, float] | None:
        """See `policy.Policy.decide`."""
        if not self._has_news or len(self._names) < 2:
            return None
        exponents = self._exponents()
        preferred = np.exp(exponents - exponents.max())  # less its maximum: the ratios stay, and nothing overflows
        shares = (1 - len(preferred) * self._explore) * preferred / preferred.sum() + self._explore
        self._shares = shares / shares.sum()
        self._has_news = False
        return dict(zip(self._names, self._shares.tolist(), strict=True))

    def _learn(self, place: int, loss: float) -> None:
        raise NotImplementedError

    def _exponents(self) -> NDArray[np.float64]:
        """[K] logarithms of what is preferred, up to a constant."""
        raise NotImplementedError


class Odm(_Bandit):
    """Online Data Mixing: shares follow a moving average R of exp(loss), the perplexity.

    For a source of the step t: R <- smoothing R + (1 - smoothing) exp(loss), from R = 0; the R of others stays. Then
    share = (1 - K e(t)) R / sum(R) + e(t). A source that was never seen has the share e(t).
    """

    def __init__(self, *, smoothing: float = 0.9, warmup_steps: int = 0) -> None:
        """Take the constants.

        Args:
            smoothing: What R keeps of itself, in [0, 1). The default is that of the authors' code; the scripts of their
                large runs have 0.5.
            warmup_steps: Steps of which nothing is learnt, and after which nothing is decided; the authors' scripts
                have 2,000 of 100,000.

        Raises:
            ValueError: `smoothing` is not in [0, 1).
        """
        super().__init__(warmup_steps)
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing is {smoothing}, which is not in [0, 1)")
        self._keep = math.log(smoothing) if smoothing else -math.inf
        self._take = math.log1p(-smoothing)

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `policy.Policy.start`."""
        super().start(names, shares)
        self._log_rewards = np.full(len(names), -np.inf)

    def _learn(self, place: int, loss: float) -> None:
        self._log_rewards[place] = np.logaddexp(self._keep + self._log_rewards[place], self._take + loss)

    def _exponents(self) -> NDArray[np.float64]:
        return self._log_rewards


class Exp3(_Bandit):
    """Exp3: shares follow an exponential of summed losses, each divided by the share that its source had.

    For a source of the step t: S <- S + loss / (10 share), from S = 0, by the share decided last. Then
    share = (1 - K e(t)) exp(e(t-1) S) / sum(exp(e(t-1) S)) + e(t), with e(0) = 1 / K.
    """

    def __init__(self, *, warmup_steps: int = 0) -> None:
        """Take the constants.

        Args:
            warmup_steps: Steps of which nothing is learnt, and after which nothing is decided.
        """
        super().__init__(warmup_steps)

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `policy.Policy.start`."""
        super().start(names, shares)
        self._rewards = np.zeros(len(names))

    def _learn(self, place: int, loss: float) -> None:
        self._rewards[place] += loss / LOSS_SCALE / max(self._shares[place], 1e-12)

    def _exponents(self) -> NDArray[np.float64]:
        return self._rewards * self._explore_before
