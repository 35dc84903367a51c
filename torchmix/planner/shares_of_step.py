"""The integer shares of a step: those of the mixture at its place in the run, less what has run out.

In: a recipe, the tokens of its sources where groups share by them, and which sources have run out. Out: int64 [S]
shares that sum to 2^32. Must hold: the recipe, the catalog, the step and what has run out decide, and nothing else. A
source that has run out gives its share to its siblings in the tree, in each of the trees that a schedule names. Cost: a
look-up where nothing changes; a walk of the trees when a source runs out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from torchmix.mixture.shares.integers import integer_shares
from torchmix.mixture.shares.schedule import Change, Schedule
from torchmix.recipe.mixture.changes import tokens_before
from torchmix.recipe.mixture.shares_of_part import stages_of_part, trees_of
from torchmix.recipe.mixture.tree import Node, stream_shares
from torchmix.recipe.parts import Part

Ints = NDArray[np.int64]
RAMP_PARTS = 64
"""Parts of a ramp that a forecast takes for constant."""


class SharesOfStep:
    """The shares of every step of a part."""

    def __init__(self, part: Part, tokens: Mapping[str, int]) -> None:
        """Take a part, and the tokens of each of its sources."""
        self._batch = part.batch
        self._names = sorted(part.sources)
        self._trees = trees_of(part, tokens=tokens)
        self._places = [(stage.start_token, stage.stop_token) for stage in stages_of_part(part)]
        self._after: tuple[frozenset[str], Schedule | None] = (frozenset(), self._schedule(frozenset()))
        has_share = np.zeros(len(self._names), bool)
        for tree in self._trees:
            has_share |= self._shares(tree, frozenset()) > 0
        self.num_with_share = int(has_share.sum())
        """Sources that give something at some time."""

    def at(self, step: int, gone: frozenset[str]) -> Ints | None:
        """int64 [S], sum 2^32: the mean over the tokens of a step; None where nothing is left that has a share.

        Args:
            step: From 0.
            gone: Names of the sources that have run out.
        """
        return self.mean(step, step + 1, gone)

    def mean(self, start: int, stop: int, gone: frozenset[str] = frozenset()) -> Ints | None:
        """int64 [S], sum 2^32: the mean over the tokens of steps [start, stop), of which there is one."""
        if self._after[0] != gone:
            self._after = gone, self._schedule(gone)
        schedule = self._after[1]
        if schedule is None:
            return None
        if schedule.is_constant:
            return schedule.shares(0, 1)
        return schedule.shares(tokens_before(self._batch, start), tokens_before(self._batch, stop))

    def borders(self, stop: int) -> list[int]:
        """Steps before `stop` from which on shares are others, ascending; a ramp counts as so many as `RAMP_PARTS`."""
        tokens = set[int]()
        for begin, end in self._places:
            tokens |= {begin + (end - begin) * part // RAMP_PARTS for part in range(RAMP_PARTS + 1)}
        steps = (bisect_left(range(stop), place, key=lambda step: tokens_before(self._batch, step)) for place in tokens)
        return sorted({step for step in steps if 0 < step < stop})

    def _schedule(self, gone: frozenset[str]) -> Schedule | None:
        shares = [self._shares(tree, gone) for tree in self._trees]
        if not any(each.any() for each in shares):
            return None
        # A stage in which nothing is left has the shares of the one before, or else of the one behind.
        now = next(each for each in shares if each.any())
        changes = []
        for place, each in zip([(0, 0), *self._places], shares, strict=True):
            now = each if each.any() else now
            changes.append(Change(start_token=place[0], stop_token=place[1], shares=now))
        return Schedule(changes[0].shares, changes[1:])

    def _shares(self, tree: Node, gone: frozenset[str]) -> Ints:
        found = stream_shares(tree, gone)
        shares = {name: found.get(name, Fraction(0)) for name in self._names}
        return integer_shares(shares) if any(shares.values()) else np.zeros(len(self._names), np.int64)
