"""The integer shares of a step: the mixture's shares at that step, without the sources that have run out.

In: a part, the tokens of its sources (for groups that share by tokens), and the sources that have run out. Out: int64
[S] shares that sum to 2^32. Must hold: shares depend on the recipe, the catalog, the step and the sources that have run
out, and on nothing else. A source that has run out gives its share to its siblings, in every tree of the schedule.
Cost: a lookup where nothing changes; a walk over the trees when a source runs out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.shares.integers import integer_shares
from torchmix.mixture.shares.places import NONE_BEGUN, Begun, StagePlaces
from torchmix.mixture.shares.schedule import Schedule, ShareChange
from torchmix.recipe.mixture.dynamic import dynamic_of, shares_in_group, with_decided
from torchmix.recipe.mixture.shares_of_part import stages_of_part, trees_of
from torchmix.recipe.mixture.tree import Node, stream_shares
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import tokens_before

NOT_DECIDED: Mapping[str, int] = MappingProxyType({})
RAMP_PARTS = 64
"""A forecast cuts a ramp into this many parts, and takes each part as constant."""


class SharesOfStep:
    """The shares of every step of a part."""

    def __init__(self, part: Part, tokens: Mapping[str, int]) -> None:
        """Take a part, and the tokens of each of its streams."""
        self._batch = part.batch
        self._names = sorted(part.streams)
        self._trees = trees_of(part, tokens=tokens)
        self.places = StagePlaces(stages_of_part(part), part.batch)
        self._deciding = dynamic_of(part)
        self._decided = NOT_DECIDED
        self._after = frozenset[str](), NONE_BEGUN, self._schedule(frozenset(), NONE_BEGUN)
        has_share = np.zeros(len(self._names), bool)
        for tree in self._trees:
            has_share |= self._shares(tree, frozenset()) > 0
        self.num_with_share = int(has_share.sum())
        """Streams with a share in at least one stage."""

    def at(
        self,
        step: int,
        gone: frozenset[str],
        decided: Mapping[str, int] = NOT_DECIDED,
        begun: Begun = NONE_BEGUN,
    ) -> Int64Array | None:
        """int64 [S], sum 2^32: the mean over the tokens of a step; None if every stream with a share has run out.

        Args:
            step: From 0.
            gone: Names of the streams that have run out.
            decided: Shares that a policy has given the children of its group; empty: the schedule's.
            begun: Stages at an epoch that have begun.
        """
        return self.mean(step, step + 1, gone, decided, begun)

    def mean(
        self,
        start: int,
        stop: int,
        gone: frozenset[str] = frozenset(),
        decided: Mapping[str, int] = NOT_DECIDED,
        begun: Begun = NONE_BEGUN,
    ) -> Int64Array | None:
        """int64 [S], sum 2^32: the mean over the tokens of steps [start, stop), one step or more; see `at`."""
        if self._after[:2] != (gone, begun) or self._decided is not decided:
            self._decided = decided
            self._after = gone, begun, self._schedule(gone, begun)
        schedule = self._after[2]
        if schedule is None:
            return None
        if schedule.is_constant:
            return schedule.shares(0, 1)
        return schedule.shares(tokens_before(self._batch, start), tokens_before(self._batch, stop))

    def borders(self, stop: int, begun: Begun = NONE_BEGUN) -> list[int]:
        """Steps before `stop` at which the shares change, ascending; a ramp counts as `RAMP_PARTS` changes."""
        tokens = set[int]()
        for begin, end in filter(None, self.places.at(begun)):
            tokens |= {begin + (end - begin) * part // RAMP_PARTS for part in range(RAMP_PARTS + 1)}
        steps = (bisect_left(range(stop), place, key=lambda step: tokens_before(self._batch, step)) for place in tokens)
        return sorted({step for step in steps if 0 < step < stop})

    def in_group(self, step: int) -> dict[str, Fraction]:
        """Share of each child in the group that a policy decides, by the schedule alone, at the end of a step."""
        assert self._deciding is not None, "the part has a policy"
        stop = tokens_before(self._batch, step + 1)
        shares = shares_in_group(self._trees[0], self._deciding.path)
        for place, tree in zip(self.places.at(NONE_BEGUN), self._trees[1:], strict=True):
            after = shares_in_group(tree, self._deciding.path)
            assert place is not None, "with a policy, no stage begins at an epoch"
            begin, end = place
            if stop < begin or set(after) != set(shares):
                break
            done = Fraction(1) if stop >= end else Fraction(stop - begin, end - begin)
            shares = {name: share + (after[name] - share) * done for name, share in shares.items()}
        return shares

    def _schedule(self, gone: frozenset[str], begun: Begun) -> Schedule | None:
        trees = self._trees
        if self._deciding is not None and self._decided:
            trees = [with_decided(tree, self._deciding.path, self._decided) for tree in trees]
        shares = [self._shares(tree, gone) for tree in trees]
        if not any(each.any() for each in shares):
            return None
        # A stage whose streams have all run out has the shares of the stage before it, or else of the next one.
        now = next(each for each in shares if each.any())
        changes = []
        for place, each in zip([(0, 0), *self.places.at(begun)], shares, strict=True):
            if place is None:
                continue
            now = each if each.any() else now
            changes.append(ShareChange(start_token=place[0], stop_token=place[1], shares=now))
        return Schedule(changes[0].shares, changes[1:])

    def _shares(self, tree: Node, gone: frozenset[str]) -> Int64Array:
        found = stream_shares(tree, gone)
        shares = {name: found.get(name, Fraction(0)) for name in self._names}
        return integer_shares(shares) if any(shares.values()) else np.zeros(len(self._names), np.int64)
