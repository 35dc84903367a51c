"""Shares within bounds: what a policy wants, kept near what the schedule says.

In: wanted shares, the schedule's shares, and two factors. Out: shares that sum to 1, each within its bounds. Must hold:
where wanted shares keep the bounds, they stay as they are; else the shares that are free keep their ratios. Cost: at
most one pass for each share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
