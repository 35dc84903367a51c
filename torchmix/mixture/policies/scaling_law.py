"""Losses over training -> the curve that they follow: loss(n) = exp(e) + exp(a) / n^alpha.

In: tokens or samples seen, and the loss there, of one source. Out: (a, e, alpha). Must hold: the same numbers give the
same curve; outliers count little, since the cost is Huber's on logarithms. Cost: some 30 ms a source of 500 points.

Source: Jiang et al., Adaptive Data Optimization (arXiv 2410.11820), section 3.1; its bounds on the parameters and its
512 starts. There L-BFGS descends from each start. Here alpha and e are scanned on a grid, where a is found by itself,
and Levenberg's and Marquardt's steps go on from the best points: without a package for optimization. Bounds are kept,
where theirs are penalties. Losses that are flat from the start fit many curves alike, and the two may take different
ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
        degree: Of the polynomials.

    Returns:
        [n]; as given where there are too few points.

    Source: Savitzky and Golay (1964); at the ends the polynomials of the first and the last window go on, as in scipy's
    `savgol_filter`.
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
