"""Exact shares -> integers that sum to 2^32.

In: exact fractions. Out: integers, by sorted name. Must hold: a share above zero never rounds to zero; equal input
gives equal output whatever the order of the recipe. Cost: once per decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from torchmix.recipe.shares import numerators

SHARE_ONE = 1 << 32


def integer_shares(fractions: Mapping[str, Fraction]) -> NDArray[np.int64]:
    """Largest-remainder rounding of shares to integers that sum to 2^32.

    Args:
        fractions: Share of each source, in [0, 1], with a positive sum. The sum need not be 1: what is
            left after a source has run out is scaled up.

    Returns:
        int64 [S] by sorted name; positive where the fraction is positive.

    Source: Hamilton's method; ties go to the name that sorts first.
    """
    names = sorted(fractions)
    parts, _ = numerators(fractions[name] for name in names)
    total = sum(parts)
    exact = [part * SHARE_ONE for part in parts]  # over `total`
    shares = [max(share // total, 1) if share > 0 else 0 for share in exact]
    missing = SHARE_ONE - sum(shares)
    # Remainders: a share lifted from zero to one already has more than its exact share, and comes last.
    by_remainder = sorted(range(len(names)), key=lambda s: (shares[s] * total - exact[s], names[s]))
    for s in by_remainder[: max(missing, 0)]:
        shares[s] += 1
    if missing < 0:  # the largest share pays for shares lifted from zero to one
        shares[max(range(len(names)), key=lambda s: (shares[s], names[s]))] += missing
    return np.array(shares, np.int64)
