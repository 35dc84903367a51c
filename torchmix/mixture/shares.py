"""Shares over training -> the shares of a step, as integers that sum to 2^32."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.recipe.amounts import apportioned, numerators
from torchmix.recipe.changes import Stage
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.structs import Batch

# --- Exact shares -> integers that sum to 2^32.
#
# A share above zero never rounds to zero; equal input gives equal output whatever the order of the recipe. Cost: once
# per decision.

SHARE_ONE = 1 << 32


def integer_shares(fractions: Mapping[str, Fraction]) -> NDArray[np.int64]:
    """Shares as integers that sum to 2^32, see `apportioned`.

    Args:
        fractions: Share of each source, in [0, 1], with a positive sum. The sum need not be 1: what is
            left after a source has run out is scaled up.

    Returns:
        int64 [S] by sorted name; positive where the fraction is positive.

    """
    names = sorted(fractions)
    parts, _ = numerators(fractions[name] for name in names)
    total = sum(parts)
    return np.array(apportioned([part * SHARE_ONE for part in parts], total, SHARE_ONE), np.int64)


# --- The changes of a schedule, some of which begin at an epoch of a stream -> where each lies in the run.
#
# Where a stage at an epoch begins follows from the position of its stream alone, and once logged it never moves; a
# stage that begins overtakes all before it that have not begun, since its shares follow from theirs. Cost: some
# operations a stage, in steps in which one begins.


class BegunStage(NamedTuple):
    """A stage at an epoch that has begun."""

    of: str
    """The stream, and its whole epochs, at which the stage begins."""
    epochs: int
    step: int
    """The first step of the stage."""


Begun = tuple[BegunStage, ...]
"""In the order in which they began."""
NONE_BEGUN: Begun = ()


class StagePlaces:
    """Where the stages of a schedule lie."""

    def __init__(self, stages: Sequence[Stage], batch: Batch) -> None:
        """Take the stages of a recipe, and its batch, for places in steps."""
        self._stages, self._batch = stages, batch
        self.have_epochs = any(stage.epoch is not None for stage in stages)
        """Whether some stage begins at an epoch."""
        self.streams = tuple(sorted({stage.epoch.of for stage in stages if stage.epoch is not None}))
        """Those whose epochs count."""

    def due(self, step: int, begun: Begun, epochs: Mapping[str, int]) -> Begun:
        """The stages that begin with a step, in their order.

        Args:
            step: From 0.
            begun: What has begun before.
            epochs: Whole epochs that each stream has given before the step.
        """
        if not self.have_epochs:
            return ()
        last = max(self.steps_of(begun), default=-1)
        last = max(last, self._last_by_tokens(step))
        return tuple(
            BegunStage(stage.epoch.of, stage.epoch.epochs, step)
            for stage in self._stages[last + 1 :]
            if stage.epoch is not None and epochs[stage.epoch.of] >= stage.epoch.epochs
        )

    def at(self, begun: Begun) -> list[tuple[int, int] | None]:
        """Tokens where each stage begins, and where its shares are reached; None of one that has not begun."""
        steps = self.steps_of(begun)
        places: list[tuple[int, int] | None] = []
        end = 0  # of the stage before: no stage begins inside another one
        for number, stage in enumerate(self._stages):
            start, stop = stage.start_token, stage.stop_token
            if stage.epoch is not None:
                if number not in steps:
                    places.append(None)
                    continue
                start = tokens_before(self._batch, steps[number])
                stop = tokens_before(self._batch, steps[number] + stage.ramp_steps) + stage.ramp_tokens
                stop += max(start, end) - start
            start = max(start, end)
            end = max(start, stop)
            places.append((start, end))
        return places

    def steps_of(self, begun: Begun) -> dict[int, int]:
        """The number of each stage at an epoch that has begun, and its first step."""
        return {number: one.step for number, one in self._found(begun)}

    def still_begun(self, begun: Begun) -> Begun:
        """What of the begun stages of another schedule this one still has: a stage at the same epoch of the same
        stream, which no stage behind it has overtaken. Its shares and its ramp may be others.
        """
        return tuple(one for _, one in self._found(begun))

    def _found(self, begun: Begun) -> list[tuple[int, BegunStage]]:
        """The number of the stage that each is; those that are none are left out."""
        found: list[tuple[int, BegunStage]] = []
        last = -1
        for one in begun:
            last = max(last, self._last_by_tokens(one.step))
            for number in range(last + 1, len(self._stages)):
                epoch = self._stages[number].epoch
                if epoch is not None and (epoch.of, epoch.epochs) == (one.of, one.epochs):
                    found.append((number, one))
                    last = number
                    break
        return found

    def stage_of(self, number: int) -> Stage:
        """A stage by its number."""
        return self._stages[number]

    def _last_by_tokens(self, step: int) -> int:
        """The number of the last stage with a place in tokens that has begun before a step; -1: none has."""
        tokens = tokens_before(self._batch, step)
        numbers = (n for n, stage in enumerate(self._stages) if stage.epoch is None and stage.start_token <= tokens)
        return max(numbers, default=-1)


# --- Shares over training -> the shares of a step.
#
# The mean is exact before it is rounded, and rounded once, to integers that sum to 2^32, so a border or a ramp inside
# a step counts for just the tokens it covers; it depends on the recipe and the step alone. Cost: one table access for
# a step without a change; some big integers a stream for a step of a ramp, about 0.1 ms for 306 streams.
#
# A position of the run is samples x length of the steps before, as Megatron counts consumed samples: a ramp of the
# batch moves it, packing does not.


class RampShape(msgspec.Struct, frozen=True, kw_only=True):
    """How a ramp goes from its first shares to its last ones. Both functions are of the part of the ramp that has
    passed, an exact fraction in [0, 1], and give exact fractions, so that all machines have the same shares."""

    progress: Callable[[Fraction], Fraction]
    """What part of the way the shares have gone: 0 at 0, 1 at 1, never falling."""
    area: Callable[[Fraction], Fraction]
    """The integral of `progress` from 0 on: the mean over a stretch is what it grows by, over the stretch."""


SINE_BITS = 192
"""Bits behind the point of the sine in a cosine ramp. The shortest step of the longest ramp is 2^-60 of it, over which
the area at an end is 2^-180; so the rounding moves no share."""
_GUARD_BITS = 64
"""Bits beyond, which take the rounding of the series: some 50 terms, each less than 4 off."""


def _pi(bits: int) -> int:
    """floor(pi x 2^bits), or one less: 16 arctan(1/5) - 4 arctan(1/239) (Machin 1706)."""

    def arctan_of_inverse(whole: int) -> int:
        power = (1 << bits + 32) // whole
        total, number, sign = power, 1, -1
        while power:
            power, number = power // (whole * whole), number + 2
            total, sign = total + sign * (power // number), -sign
        return total

    return (16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)) >> 32


_BITS = SINE_BITS + _GUARD_BITS
_PI = _pi(_BITS)


def _sine(part: Fraction) -> int:
    """sin(pi x part) x 2^_BITS, for `part` in [-1/2, 1/2], by its series; less than 2^8 off."""
    angle = _PI * part.numerator // part.denominator
    square = angle * angle >> _BITS
    total, term, number = angle, angle, 1
    while term not in (0, -1):
        term = -(term * square >> _BITS) // ((number + 1) * (number + 2))
        total, number = total + term, number + 2
    return total


def _nearest(value: int) -> Fraction:
    """An integer of _BITS bits behind the point, rounded to SINE_BITS."""
    return Fraction((value + (1 << _GUARD_BITS - 1)) >> _GUARD_BITS, 1 << SINE_BITS)


def _cosine_progress(part: Fraction) -> Fraction:
    """(1 - cos(pi x part)) / 2."""
    return Fraction(1, 2) + _nearest(_sine(part - Fraction(1, 2))) / 2


def _cosine_area(part: Fraction) -> Fraction:
    """part / 2 - sin(pi x part) / (2 pi)."""
    sine = _sine(min(part, 1 - part))  # the series is short up to a quarter of the circle
    return part / 2 - _nearest((sine << _BITS) // (2 * _PI))


RAMP_SHAPES: dict[str, RampShape] = {
    "line": RampShape(progress=lambda part: part, area=lambda part: part * part / 2),
    "cosine": RampShape(progress=_cosine_progress, area=_cosine_area),
}
"""By the words of the recipe's `SHAPES`."""


class ShareChange(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """New shares, which hold at once or are reached along a ramp."""

    start_token: int
    """Token of the run where the change begins, 0 or more."""
    stop_token: int
    """Token where the new shares are reached; equal to `start_token` where they hold at once."""
    shares: Int64Array
    """int64 [S], sum 2^32: the shares from `stop_token` on."""
    shape: str = "line"
    """A key of RAMP_SHAPES."""


class _Stretch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tokens over which the shares are constant, or go along one ramp."""

    start: int
    stop: int | None
    """None: it never ends."""
    before: Int64Array
    after: Int64Array
    """The shares at its end; the same object as `before` where they are constant."""
    shape: str = "line"


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
                _Stretch(
                    start=change.start_token,
                    stop=change.stop_token,
                    before=now,
                    after=change.shares,
                    shape=change.shape,
                )
            )
        at, now = change.stop_token, change.shares
    return [*stretches, _Stretch(start=at, stop=None, before=now, after=now)]


def _mean(parts: Sequence[tuple[_Stretch, int, int]], num_tokens: int) -> Int64Array:
    """The mean of the shares over stretches, each with the tokens [begin, end) of it that count.

    Over [begin, end) of a ramp from `before` at `start` to `after` at `stop`, the shares sum to before x (end - begin)
    + (after - before) x (area(end) - area(begin)), where the area is that of the ramp's shape, scaled to its length.
    """
    gone = [_gone(stretch, begin, end) for stretch, begin, end in parts]
    scale = lcm(*(tokens.denominator for tokens in gone))
    total = np.zeros(len(parts[0][0].before), object)  # the products have some hundreds of bits
    for (stretch, begin, end), tokens in zip(parts, gone, strict=True):
        before = stretch.before.astype(object)
        total += before * (scale * (end - begin))
        if tokens:
            total += (stretch.after.astype(object) - before) * int(scale * tokens)
    return np.array(apportioned(total.tolist(), scale * num_tokens, SHARE_ONE), np.int64)


def _gone(stretch: _Stretch, begin: int, end: int) -> Fraction:
    """The tokens that [begin, end) of a stretch would have at the shares of its end."""
    if stretch.before is stretch.after or stretch.stop is None:
        return Fraction(0)
    length, area = stretch.stop - stretch.start, RAMP_SHAPES[stretch.shape].area
    first, last = (area(Fraction(place - stretch.start, length)) for place in (begin, end))
    return (last - first) * length
