"""What a step asks of its streams, and the draws that answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec
import numpy as np

from torchmix.array_types import Int64, Int64Array
from torchmix.mixture.draw import MAX_ASKED_TOKENS, Draw, NextWindows, Position, Stretches, draw, draw_documents
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.shares import NONE_BEGUN, RAMP_SHAPES, Begun, Schedule, ShareChange, StagePlaces, integer_shares
from torchmix.planner.pack import Pieces, aligned
from torchmix.planner.stream_order import DOCUMENT_CHARGE
from torchmix.recipe.changes import dynamic_of, shares_in_group, stages_of_part, trees_of, with_decided
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.tree import Node, stream_shares

# --- The integer shares of a step: the mixture's shares at that step, without the sources that have run out.
#
# Shares depend on the recipe, the catalog, the step and the sources that have run out, and on nothing else. A source
# that has run out gives its share to its siblings, in every tree of the schedule. Cost: a lookup where nothing
# changes; a walk over the trees when a source runs out.

NOT_DECIDED: Mapping[str, int] = {}
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
        for number, place in enumerate(self.places.at(NONE_BEGUN)):
            tree, shape = self._trees[number + 1], RAMP_SHAPES[self.places.stage_of(number).shape]
            after = shares_in_group(tree, self._deciding.path)
            assert place is not None, "with a policy, no stage begins at an epoch"
            begin, end = place
            if stop < begin or set(after) != set(shares):
                break
            done = Fraction(1) if stop >= end else shape.progress(Fraction(stop - begin, end - begin))
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
        for number, (place, each) in enumerate(zip([(0, 0), *self.places.at(begun)], shares, strict=True)):
            if place is None:
                continue
            now = each if each.any() else now
            shape = self.places.stage_of(number - 1).shape if number else "line"
            changes.append(ShareChange(start_token=place[0], stop_token=place[1], shares=now, shape=shape))
        return Schedule(changes[0].shares, changes[1:])

    def _shares(self, tree: Node, gone: frozenset[str]) -> Int64Array:
        found = stream_shares(tree, gone)
        shares = {name: found.get(name, Fraction(0)) for name in self._names}
        return integer_shares(shares) if any(shares.values()) else np.zeros(len(self._names), np.int64)


# --- How many tokens a draw asks for, so that the drawn pieces fill the batch after alignment.
#
# Pure, in integers; alignment adds at most a quarter of a batch to what a draw gives beyond the missing tokens, unless
# asking less would give nothing.
#
# Short documents with a large alignment take up many times their tokens. The ratio over all earlier draws predicts
# this factor. Where lengths change the prediction fails; then the draw is discarded and repeated with fewer tokens.

MOST_ALIGNED = 1 << 40
"""Totals above this are halved, so they stay small and the ratio follows recent draws."""


class DrawnTokens(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of all draws so far."""

    raw: Int64 = 1
    """Tokens without alignment; where shares count documents, what these cost."""
    aligned: Int64 = 1
    """Tokens with each piece rounded up to the alignment."""

    def to_ask(self, need_tokens: int) -> int:
        """Tokens to ask for, 1 or more, when `need_tokens` aligned tokens are missing."""
        return max(1, -(-need_tokens * self.raw // self.aligned))

    def plus(self, raw_tokens: int, aligned_tokens: int) -> DrawnTokens:
        """The totals after a draw."""
        raw, aligned = self.raw + raw_tokens, self.aligned + aligned_tokens
        while aligned > MOST_ALIGNED:
            raw, aligned = raw // 2, aligned // 2
        return DrawnTokens(raw=raw, aligned=aligned)


def ask_less(
    asked_tokens: int, *, need_tokens: int, raw_tokens: int, aligned_tokens: int, capacity_tokens: int
) -> int | None:
    """Tokens to ask for when a draw is repeated from the same position; None if the draw counts.

    Args:
        asked_tokens: Tokens that the draw asked for.
        need_tokens: Aligned tokens that were missing.
        raw_tokens, aligned_tokens: Tokens that the draw gave, before and after alignment.
        capacity_tokens: Capacity of the step's batch.
    """
    if aligned_tokens - max(raw_tokens, need_tokens) <= capacity_tokens // 4:
        return None
    less = need_tokens * raw_tokens // aligned_tokens
    return less if 1 <= less < asked_tokens else None


# --- Draws from the streams of a part, and the windows that draws keep.
#
# What is kept decides nothing; a draw follows from its arguments and the orders alone.


class Drawing:
    """Draws from the streams of a part."""

    def __init__(self, part: Part, orders: Sequence[StreamOrder], max_epochs: Int64Array, *, align_tokens: int) -> None:
        """Take the streams.

        Args:
            part: What is planned.
            orders: [S] orders of its streams, by sorted name.
            max_epochs: int64 [S] epochs that each may give.
            align_tokens: A piece takes a multiple of this many tokens in its sample.
        """
        self._orders, self._max_epochs, self._align_tokens = orders, max_epochs, align_tokens
        self._counts_documents = part.counts_documents
        self._next_windows = NextWindows(orders, max_epochs)
        number = {name: s for s, name in enumerate(sorted(part.sources))}
        streams = [part.streams[name] for name in sorted(part.streams)]
        self.source_of_stream = np.array([number[stream.sources[0]] for stream in streams], np.int64)
        """[S] the first source of each."""
        self._has_own_rows = np.array([stream.is_flat for stream in streams], np.bool_)
        """[S] whether the rows of a stream's space are not those of one source."""

    def forget(self) -> None:
        """Hold nothing of the orders that were drawn from: they have changed."""
        self._next_windows = NextWindows(self._orders, self._max_epochs)

    def draw(
        self, position: Position, shares: Int64Array, need: int, drawn: DrawnTokens, capacity: int
    ) -> tuple[Draw, int, int]:
        """The draw that counts when `need` aligned tokens are missing; what it cost, and the aligned tokens it gave."""
        ask: int | None = min(drawn.to_ask(need), MAX_ASKED_TOKENS)
        while ask is not None:
            found = draw(self._orders, shares, position, ask, max_epochs=self._max_epochs)
            raw, sum_aligned = self._cost_of(found.stretches), self.aligned_sum(found.stretches.tokens)
            ask = ask_less(ask, need_tokens=need, raw_tokens=raw, aligned_tokens=sum_aligned, capacity_tokens=capacity)
        return found, raw, sum_aligned

    def documents(
        self, position: Position, shares: Int64Array, count: int, drawn: DrawnTokens
    ) -> tuple[Draw, DrawnTokens]:
        """So many documents, or as many as there are, and the totals with them; see `draw_documents`."""
        charge = DOCUMENT_CHARGE if self._counts_documents else None
        found = draw_documents(self._orders, shares, position, count, max_epochs=self._max_epochs, charge=charge)
        return found, drawn.plus(self._cost_of(found.stretches), self.aligned_sum(found.stretches.tokens))

    def follow(self, before: Position, after: Position, asked: Int64Array) -> None:
        """Make windows that will be due soon; see `NextWindows.follow`."""
        self._next_windows.follow(before, after, asked)

    def _cost_of(self, stretches: Stretches) -> int:
        """What streams are charged for stretches: their tokens, or documents, which are drawn as a whole."""
        if self._counts_documents:
            return DOCUMENT_CHARGE * int(np.count_nonzero(stretches.tokens))
        return int(stretches.tokens.sum())

    def aligned_sum(self, tokens: Int64Array) -> int:
        """Tokens that stretches take in their samples."""
        # A stretch is split into whole samples and a rest, so rounding up the whole stretch gives the same sum.
        return int(aligned(tokens, self._align_tokens).sum() if self._align_tokens > 1 else tokens.sum())

    def pieces_of(self, step: int, stretches: Stretches) -> Pieces:
        """What was drawn in a step, by source and row there."""
        source, row = self.source_of_stream[stretches.stream], stretches.row
        own = np.flatnonzero(self._has_own_rows[stretches.stream])
        if len(own):
            row = row.copy()
            for s in np.unique(stretches.stream[own]).tolist():
                mine = own[stretches.stream[own] == s]
                source[mine], row[mine] = self._orders[s].space.places(stretches.row[mine])
        return Pieces(
            stream=stretches.stream,
            source=source,
            epoch=stretches.epoch,
            row=row,
            start=stretches.start,
            tokens=stretches.tokens,
            drawn_step=np.full_like(row, step),
            document_tokens=stretches.document_tokens,
        )
