"""Shares that follow what the model learns: the policies, their limits, and the rank that decides."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from inspect import isfunction
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import PlanError, RecipeError
from torchmix.lazy_names import imported
from torchmix.mixture.policy_log import LOG_START, StepRecord, encoded, next_digest
from torchmix.mixture.shares import integer_shares
from torchmix.recipe.amounts import parse_share
from torchmix.recipe.build import nearest
from torchmix.recipe.changes import Deciding
from torchmix.recipe.structs import Dynamic

# --- What a policy observes, and what it answers.
#
# A policy is a function of what it observed, in that order, and keeps nothing else: fed the same records again, it
# answers the same. One rank asks it; its answers are logged, and everyone else reads the log.


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
            losses: By child that had tokens in the step, the sum of the losses of its tokens (nats) and their
                number, 1 or more.
        """

    def decide(self, step: int) -> Mapping[str, float] | None:
        """The shares from now on, not negative, of any positive sum; None: as they are.

        Args:
            step: The last step that was observed, or a later one.
        """


# --- Shares within bounds: what a policy wants, kept near what the schedule says.
#
# Where wanted shares keep the bounds, they stay as they are; else the shares that are free keep their ratios. Cost: at
# most one pass for each share.

Shares = NDArray[np.float64]


def within(wanted: Shares, planned: Shares, *, lowest: float, highest: float) -> Shares:
    """The shares in proportion to the wanted ones that stay within factors of the planned ones.

    Args:
        wanted: [n] not negative, with a positive sum.
        planned: [n] above 0, sum 1.
        lowest: In [0, 1]: no share falls below this multiple of the planned one.
        highest: 1 or more: no share rises above this multiple of it.

    Returns:
        [n] sum 1. One factor scales all shares that meet no bound, so their ratios are the wanted ones.
    """
    low, high = planned * lowest, np.minimum(planned * highest, 1.0)
    if highest * float(planned.sum()) <= 1.0:
        return np.asarray(planned / planned.sum())
    wanted = np.maximum(wanted / wanted.sum(), np.finfo(float).tiny)
    # sum(clip(factor * wanted, low, high)) grows with the factor: between two borders it is linear.
    borders = np.unique(np.concatenate([low / wanted, high / wanted]))
    sums = np.array([np.clip(border * wanted, low, high).sum() for border in borders])
    after = min(int(np.searchsorted(sums, 1.0)), len(borders) - 1)
    middle = (borders[max(after - 1, 0)] + borders[after]) / 2
    is_free = (middle * wanted > low) & (middle * wanted < high)
    fixed = np.clip(middle * wanted, low, high)[~is_free].sum()
    free = wanted[is_free].sum()
    factor = (1.0 - fixed) / free if free > 0 else borders[after]
    shares = np.clip(factor * wanted, low, high)
    return np.asarray(shares / shares.sum())


def with_floor(shares: Shares, floor: float) -> Shares:
    """Shares of which none lies below a floor, before they are scaled to sum to 1.

    Args:
        shares: [n] sum 1.
        floor: At least this much each. Where n floors exceed 1/2, half of an equal share takes its place, so that many
            sources do not leave every share at the floor.

    Source: `clip_min_probability` of ADO's authors, with the floor scaled.
    """
    floor = min(floor, 0.5 / len(shares))
    clipped = np.maximum(shares, floor)
    return np.asarray(clipped / clipped.sum())


# --- Losses over training -> the curve that they follow: loss(n) = exp(e) + exp(a) / n^alpha.
#
# The same numbers give the same curve; outliers count little, since the cost is Huber's on logarithms. Cost: some 30
# ms a source of 500 points.
#
# Source: Jiang et al., Adaptive Data Optimization (arXiv 2410.11820), section 3.1; its bounds on the parameters and
# its 512 starts. There L-BFGS descends from each start. Here alpha and e are scanned on a grid, where a is found by
# itself, and Levenberg's and Marquardt's steps resume from the best points: without a package for optimization. Bounds
# are kept, where theirs are penalties. Losses that are flat from the start fit many curves alike, and the two may take
# different ones.

Floats = NDArray[np.float64]

HUBER_DELTA = 1e-3
LOWEST_ALPHA, HIGHEST_ALPHA = 0.001, 0.8
HIGHEST_A = 6.5
LOWEST_E = 0.5
"""Bounds of the authors' code: below exp(0.5) no text is predicted."""
STARTS = 10
STEPS = 60


def fit_scaling_law(seen: Floats, losses: Floats) -> tuple[float, float, float]:
    """(a, e, alpha) of the curve through n points.

    Args:
        seen: [n] tokens or samples seen so far, above 0.
        losses: [n] the loss there, above 0.
    """
    log_seen, target = np.log(seen), np.log(losses)
    best = min((_descend(start, log_seen, target) for start in _starts(log_seen, target)), key=lambda found: found[0])
    a, e, alpha = best[1]
    return float(a), float(e), float(alpha)


def cost_of(parameters: Floats, log_seen: Floats, target: Floats) -> float:
    """Huber's cost of a curve, summed over the points; `target` is the logarithm of the losses."""
    residual = np.abs(_predict(parameters, log_seen)[0] - target)
    huber = np.where(residual > HUBER_DELTA, HUBER_DELTA * (residual - HUBER_DELTA / 2), residual**2 / 2)
    return float(huber.sum())


def smoothed(losses: Floats, window: int = 101, degree: int = 3) -> Floats:
    """Losses without their noise: each is the value there of the polynomial through its neighbours.

    Args:
        losses: [n].
        window: Neighbours, an odd number; the largest odd number up to n where fewer are there.
        degree: The degree of the polynomials.

    Returns:
        [n]; as given where there are too few points.

    Source: Savitzky and Golay (1964); at the ends the polynomials of the first and the last window continue, as in
    scipy's `savgol_filter`.
    """
    window = min(window, len(losses) - (len(losses) + 1) % 2)
    if window <= degree:
        return losses
    half = window // 2
    powers = np.vander(np.arange(-half, half + 1) / max(half, 1), degree + 1, increasing=True)
    values = powers @ np.linalg.pinv(powers)  # row i: weights of the value at place i of a window
    inner = np.convolve(losses, values[half][::-1], mode="valid")
    return np.concatenate([values[:half] @ losses[:window], inner, values[half + 1 :] @ losses[-window:]])


def _predict(parameters: Floats, log_seen: Floats) -> tuple[Floats, Floats]:
    """Logarithm of the curve, and which part of it falls with n."""
    a, e, alpha = parameters
    falling = a - alpha * log_seen
    value = np.logaddexp(falling, e)
    return value, np.exp(falling - value)


def _starts(log_seen: Floats, target: Floats) -> list[Floats]:
    """The best points of a grid over e and alpha, where a is the median of what each point asks."""
    alphas = np.linspace(0.02, HIGHEST_ALPHA, 20)
    points = [(np.inf, np.array([0.0, LOWEST_E, 0.1]))]
    for e in np.linspace(LOWEST_E, max(float(target.min()), LOWEST_E + 0.05), 20):
        above = np.exp(target) - np.exp(e)
        is_above = above > 0
        if not is_above.any():
            continue
        asked = np.log(above[is_above]) + alphas[:, None] * log_seen[is_above]
        for a, alpha in zip(np.minimum(np.median(asked, axis=1), HIGHEST_A), alphas, strict=True):
            parameters = np.array([a, e, alpha])
            points.append((cost_of(parameters, log_seen[::4], target[::4]), parameters))
    return [parameters for _, parameters in sorted(points, key=lambda point: point[0])[:STARTS]]


def _descend(start: Floats, log_seen: Floats, target: Floats) -> tuple[float, Floats]:
    now, cost, damping = start, cost_of(start, log_seen, target), 1e-3
    for _ in range(STEPS):
        value, falling = _predict(now, log_seen)
        residual = value - target
        weight = HUBER_DELTA / np.maximum(np.abs(residual), HUBER_DELTA)
        slopes = np.stack([falling, 1 - falling, -falling * log_seen], axis=1)
        gradient = slopes.T @ (weight * residual)
        curvature = slopes.T @ (weight[:, None] * slopes)
        scale = np.diag(np.diag(curvature) + 1e-12)
        step = np.linalg.lstsq(curvature + damping * scale, -gradient, rcond=None)[0]
        tried = _bounded(now + step)
        tried_cost = cost_of(tried, log_seen, target)
        if tried_cost < cost:
            if cost - tried_cost < 1e-10 * cost:
                return tried_cost, tried
            now, cost, damping = tried, tried_cost, damping / 3
        else:
            damping *= 4
            if damping > 1e12:
                break
    return cost, now


def _bounded(parameters: Floats) -> Floats:
    a, e, alpha = parameters
    return np.array([min(a, HIGHEST_A), max(e, LOWEST_E), min(max(alpha, LOWEST_ALPHA), HIGHEST_ALPHA)])


# --- Adaptive Data Optimization: more of the sources whose loss still falls, judged by a curve through each one's
# losses.
#
# See `policy.Policy`. Cost: a fit of every curve each `refit_steps`, some 30 ms a source; else some array operations.
#
# Source: Jiang, Zhou, Feng, Malladi, Kolter: Adaptive Data Optimization: Dynamic Sample Selection with Scaling Laws
# (arXiv 2410.11820), with the choices of the authors' code (yidingjiang/ado): its smoothing, its floor of 1 % and its
# constants. A share is proportional to prior x slope of the curve x sqrt(h), where h is a moving average of what was
# seen. Three things differ from that code. Losses and h count tokens, not samples. The first fit is at `start_step`,
# not at the next multiple of `refit_steps`. Between two decisions the last one enters the average of shares once a
# step. `with_floor` and `fit_scaling_law` name their own differences.

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
        """See `Policy.decide`."""
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


# --- Bandits whose arms are the sources and whose reward is the loss: Online Data Mixing, and Exp3, which it came
# from.
#
# See `policy.Policy`. Cost: an exponential of each source.
#
# Source: Albalak, Pan, Raffel, Wang: Efficient Online Data Mixing for Language Model Pre-Training (arXiv 2312.02406),
# and their code (alon-albalak/online-data-mixing). It has several methods, and names `SmoothedMeanWeightUpdater` as
# the paper's; `Odm` is its `group_update`. `Exp3` is the `group_update` of `Exp3WeightUpdater`, after Auer, Cesa-
# Bianchi, Freund, Schapire: The Nonstochastic Multiarmed Bandit Problem (2002). With K sources, both mix what they
# prefer with
#
#     e(t) = min(1 / K, sqrt(ln K / (K t)))
#
# of every source, so shares are equal in the first K ln K steps. Both differ from the authors' code in two ways: a
# step between two decisions is learnt from too, and logarithms keep large losses from overflowing.

LOSS_SCALE = 10.0
"""By which Exp3 divides losses, so that its sums stay small."""


class _Bandit:
    """What both share: the steps that count, and how much of every source is explored."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `Policy.start`."""
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
        """See `Policy.decide`."""
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
        """See `Policy.start`."""
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
        """See `Policy.start`."""
        super().start(names, shares)
        self._rewards = np.zeros(len(names))

    def _learn(self, place: int, loss: float) -> None:
        self._rewards[place] += loss / LOSS_SCALE / max(self._shares[place], 1e-12)

    def _exponents(self) -> NDArray[np.float64]:
        return self._rewards * self._explore_before


# --- Shares that an operator writes into a file while the run continues.
#
# A file that is missing says nothing; one that is half written or wrong is an error, and the shares stay as they are
# where the recipe says `on_error: keep`. Replace the file by a rename, so that nobody reads half of it. Cost: one read
# of a small file for each decision.


class SharesFile:
    """See the file."""

    def __init__(self, *, path: str) -> None:
        """Take the file, which need not exist yet."""
        self._path = Path(path)

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `Policy.start`."""
        self._names = list(names)
        self._last: dict[str, float] | None = None

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """See `policy.Policy.observe`; losses do not matter."""

    def decide(self, step: int) -> Mapping[str, float] | None:
        """See `policy.Policy.decide`.

        Raises:
            RecipeError: The file is no mapping of every child to a share.
        """
        from torchmix.recipe.load import parse_yaml  # YAML is slow to load, and not needed without such a policy

        try:
            content, _ = parse_yaml(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, RecipeError) as error:
            raise RecipeError(f"{self._path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
        shares = self._checked(content)
        if shares == self._last:
            return None
        self._last = shares
        return shares

    def _checked(self, content: object) -> dict[str, float]:
        if not isinstance(content, dict):
            raise RecipeError(
                f"{self._path}: holds no mapping of names to shares; write {{{self._names[0]}: 70%, ...}}"
            )
        for name in content:
            if name not in self._names:
                raise RecipeError(
                    f"{self._path}: {name!r} is no child of this group{nearest(str(name), self._names)}; its children "
                    f"are {', '.join(self._names)}"
                )
        missing = [name for name in self._names if name not in content]
        if missing:
            raise RecipeError(f"{self._path}: has no share of {', '.join(missing)}; write one for every child")
        return {name: float(parse_share(content[name], f"{self._path}: {name}")) for name in self._names}


# --- Shares that follow from the step alone: a pure function of the user's in the place of a policy.
#
# Nobody reports losses to it, so records are made ahead of the steps that they hold for. Cost: the function's own.

FunctionOfStep = Callable[[int], Mapping[str, float]]


class OfStep:
    """Asks a function for the shares from the step on from which its answer holds."""

    def __init__(self, function: FunctionOfStep, lag_steps: int) -> None:
        """A decision after step s holds from step s + `lag_steps` on."""
        self._function, self._lag_steps = function, lag_steps

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `Policy.start`; nothing is kept."""

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """See `Policy.observe`; nothing is looked at."""

    def decide(self, step: int) -> Mapping[str, float]:
        """See `Policy.decide`."""
        return self._function(step + self._lag_steps)


def function_of_step(dynamic: Dynamic | None) -> FunctionOfStep | None:
    """The function that a recipe names in the place of a policy; None: it names a policy, or nothing.

    Raises:
        RecipeError: What it names cannot be imported.
    """
    if dynamic is None or ":" not in dynamic.policy:
        return None
    found = imported(dynamic.policy, "dynamic.policy")
    return found if isfunction(found) else None


# --- The policy that a recipe names: one of the table, or the user's. A new one is a row here, and its name in
# `POLICIES` of `recipe/changes.py`.
#
# Only the recipe names code; nothing of a state, a log or a message is imported. Cost: the import of a user's own
# module.


class BuiltInPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that a recipe names by a word."""

    make: Callable[..., Policy]
    """Called with the recipe's `options`."""
    path_options: tuple[str, ...] = ()
    """Options that are paths, relative to the recipe's folder."""


POLICIES_BY_NAME: dict[str, BuiltInPolicy] = {
    "ado": BuiltInPolicy(make=Ado),
    "odm": BuiltInPolicy(make=Odm),
    "exp3": BuiltInPolicy(make=Exp3),
    "file": BuiltInPolicy(make=SharesFile, path_options=("path",)),
}
"""By the words of the recipe's `POLICIES`."""


def open_policy(dynamic: Dynamic, base: str | Path, *, lag_steps: int = 1) -> Policy:
    """Make the policy.

    Args:
        dynamic: The recipe's.
        base: The folder that paths in the options are relative to.
        lag_steps: From a decision to the first step that it holds for.

    Raises:
        RecipeError: Its module or class does not exist, or does not take the options.
    """
    options = dict(dynamic.options)
    function = function_of_step(dynamic)
    if function is not None:
        if options:
            raise RecipeError("a function takes the step alone; remove them, or name a class", "dynamic.options")
        return OfStep(function, lag_steps)
    row = POLICIES_BY_NAME.get(dynamic.policy) or BuiltInPolicy(make=imported(dynamic.policy, "dynamic.policy"))
    for key in row.path_options:
        if isinstance(options.get(key), str):
            options[key] = str(Path(base, str(options[key])))
    try:
        policy = row.make(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"the policy {dynamic.policy!r} does not take these options: {error}", "dynamic.options"
        ) from None
    missing = [name for name in ("start", "observe", "decide") if not callable(getattr(policy, name, None))]
    if missing:
        raise RecipeError(f"the policy {dynamic.policy!r} has no method {', '.join(missing)}", "dynamic.policy")
    return policy


# --- One rank's decisions: a policy observes losses, is asked at its steps, and its answers are logged.
#
# The policy is told exactly what the log holds, so that a resume, which feeds it the log, finds it as it was; a policy
# that fails changes no share where the recipe says `on_error: keep`. Cost: the policy's own, and one line of the log a
# step.

logger = logging.getLogger(__name__)


class Log(Protocol):
    """Where records go."""

    digest: str
    """The digest of all records so far."""

    def append(self, record: StepRecord, *, to_disk: bool = False) -> None:
        """Add a record; `to_disk`: it also outlives this machine."""


class Decider:
    """Holds the policy; see the file."""

    def __init__(
        self,
        policy: Policy,
        log: Log,
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
            losses: By child with tokens in the step: summed loss, and number of tokens.

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


class _KeptDigest:
    """The digest of a log that nobody writes."""

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def append(self, record: StepRecord, *, to_disk: bool = False) -> None:
        self.digest = next_digest(self.digest, encoded(record))


class RecordsOfFunction:
    """The decisions of a function of the step, made when they are asked for; see `planner.cursor.DecisionRecords`."""

    branch = ""

    def __init__(
        self,
        dynamic: Dynamic,
        deciding: Deciding,
        planned: Callable[[int], Mapping[str, Fraction]],
        *,
        earlier: Sequence[tuple[StepRecord, str]] = (),
    ) -> None:
        """Take the function.

        Args:
            dynamic: The recipe's, which names a function.
            deciding: The same as numbers.
            planned: As `Decider` takes it.
            earlier: The records of the run so far, each with the digest of the log up to it; these hold.
        """
        self._records = {record.step: (record, digest) for record, digest in earlier}
        self._next = len(earlier)
        self._log = _KeptDigest(earlier[-1][1] if earlier else LOG_START)
        self._decider = decider_of(dynamic, deciding, ".", self._log, planned)

    def record(self, step: int) -> tuple[StepRecord, str]:
        """See `planner.cursor.DecisionRecords.record`; nothing is waited for.

        Raises:
            PlanError: The function failed, and the recipe says `on_error: stop`.
        """
        while self._next <= step:
            made = self._decider.observe(self._next, {})
            if self._decider.is_decision(self._next):
                self._records[self._next] = made, self._log.digest
            self._next += 1
        return self._records[step]

    def is_known(self, step: int) -> bool:
        """See `planner.cursor.DecisionRecords.is_known`."""
        return True

    def close(self) -> None:
        """Nothing is open."""


def decider_of(
    dynamic: Dynamic,
    deciding: Deciding,
    base: str | Path,
    log: Log,
    planned: Callable[[int], Mapping[str, Fraction]],
    earlier: Iterable[StepRecord] = (),
) -> Decider:
    """The one that decides for a recipe; `base` is its folder, the others are as `Decider` takes them."""
    policy = open_policy(dynamic, base, lag_steps=deciding.lag_steps)
    return Decider(
        policy,
        log,
        name=dynamic.policy,
        planned=planned,
        every=deciding.every_steps,
        lowest=float(deciding.lowest),
        highest=float(deciding.highest),
        keep_on_error=dynamic.on_error == "keep",
        earlier=() if isinstance(policy, OfStep) else earlier,  # a function keeps nothing of them
    )
