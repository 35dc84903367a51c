"""Shares over training -> the shares of a step.

In: the shares at the start, and changes at positions of the run, in tokens. Out: for a step, which covers tokens
[start, stop) of the run, the mean of the shares over these tokens. Must hold: the mean is exact before it is rounded,
and rounded once, to integers that sum to 2^32, so a border or a ramp inside a step counts for just the tokens it
covers; it depends on the recipe and the step alone. Cost: one table access for a step without a change; some big
integers a stream for a step of a ramp, about 0.1 ms for 306 streams.

A position of the run is samples x length of the steps before, as Megatron counts consumed samples: a ramp of the batch
moves it, packing does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import lcm

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.shares.integers import SHARE_ONE


class ShareChange(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """New shares, which hold at once or are reached on a straight line."""

    start_token: int
    """Token of the run where the change begins, 0 or more."""
    stop_token: int
    """Token where the new shares are reached; equal to `start_token` where they hold at once."""
    shares: Int64Array
    """int64 [S], sum 2^32: the shares from `stop_token` on."""


class _Stretch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tokens over which the shares are constant, or go along one line."""

    start: int
    stop: int | None
    """None: it never ends."""
    before: Int64Array
    after: Int64Array
    """The shares at its end; the same object as `before` where they are constant."""


class Schedule:
    """The shares of S streams over the whole run."""

    def __init__(self, shares: Int64Array, changes: Sequence[ShareChange] = ()) -> None:
        """Take the shares at token 0, and the changes in the order of their positions, which do not overlap."""
        self._stretches = _stretches(shares, changes)
        self._starts = [stretch.start for stretch in self._stretches]

    @property
    def is_constant(self) -> bool:
        """Whether the shares never change."""
        return len(self._stretches) == 1

    def shares(self, start: int, stop: int) -> Int64Array:
        """int64 [S], sum 2^32: the mean over tokens [start, stop) of the run; `stop` is above `start`."""
        first = bisect_right(self._starts, start) - 1
        stretch = self._stretches[first]
        if stretch.before is stretch.after and (stretch.stop is None or stop <= stretch.stop):
            return stretch.before
        parts = []
        for stretch in self._stretches[first:]:
            if stretch.start >= stop:
                break
            begin, end = max(start, stretch.start), stop if stretch.stop is None else min(stop, stretch.stop)
            parts.append((stretch, begin, end))
        return _mean(parts, stop - start)


def _stretches(shares: Int64Array, changes: Sequence[ShareChange]) -> list[_Stretch]:
    stretches: list[_Stretch] = []
    at, now = 0, shares
    for change in changes:
        assert at <= change.start_token <= change.stop_token, "changes are in order, and none begins inside another"
        if change.start_token > at:
            stretches.append(_Stretch(start=at, stop=change.start_token, before=now, after=now))
        if change.stop_token > change.start_token:
            stretches.append(
                _Stretch(start=change.start_token, stop=change.stop_token, before=now, after=change.shares)
            )
        at, now = change.stop_token, change.shares
    return [*stretches, _Stretch(start=at, stop=None, before=now, after=now)]


def _mean(parts: Sequence[tuple[_Stretch, int, int]], num_tokens: int) -> Int64Array:
    """The mean of the shares over stretches, each with the tokens [begin, end) of it that count.

    Over [begin, end) of a line from `before` at `start` to `after` at `stop`, the mean is that of its two ends:
    before + (after - before) * (begin + end - 2 start) / (2 (stop - start)).
    """
    scale = 1
    for stretch, _, _ in parts:
        if stretch.before is not stretch.after and stretch.stop is not None:
            scale = lcm(scale, 2 * (stretch.stop - stretch.start))
    total = np.zeros(len(parts[0][0].before), object)  # the products have up to 140 bits
    for stretch, begin, end in parts:
        before = stretch.before.astype(object)
        total += before * (scale * (end - begin))
        if stretch.before is not stretch.after and stretch.stop is not None:
            slope = scale // (2 * (stretch.stop - stretch.start))
            total += (stretch.after.astype(object) - before) * (
                slope * (begin + end - 2 * stretch.start) * (end - begin)
            )
    return _rounded(total.tolist(), scale * num_tokens)


def _rounded(parts: list[int], whole: int) -> Int64Array:
    """Integers that sum to 2^32, as near to `parts` / `whole` as largest remainders bring them; ties go to the first.

    Every positive part gets at least 1, and the largest part pays for that.
    """
    shares = [max(part // whole, 1) if part else 0 for part in parts]
    missing = SHARE_ONE - sum(shares)
    if missing > 0:
        by_remainder = sorted(range(len(parts)), key=lambda s: (shares[s] * whole - parts[s], s))
        for s in by_remainder[:missing]:
            shares[s] += 1
    elif missing < 0:
        shares[max(range(len(parts)), key=lambda s: (shares[s], -s))] += missing
    return np.array(shares, np.int64)
