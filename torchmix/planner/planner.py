"""The fold: `step(cursor) -> (StepPlan, cursor')`, pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.earlier import EarlierRows
from torchmix.catalog.settings import settings_of
from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.store import Catalog, View
from torchmix.errors import CatalogMissing
from torchmix.mixture.draw import Position, Stretches, exhausted_error, joined
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.windows import denied_fingerprint
from torchmix.parallel.place_tree import Layout
from torchmix.planner import pack
from torchmix.planner.contexts import least_layout
from torchmix.planner.cursor import (
    UNDECIDED,
    Cursor,
    Decided,
    Decision,
    DecisionRecords,
    Eras,
    RunRows,
    begun_by,
    decided_at,
    gone_by,
)
from torchmix.planner.drawing import Drawing, DrawnTokens, SharesOfStep
from torchmix.planner.eras import EditedOrders, still_needed
from torchmix.planner.folding import FoldedStep, Folding
from torchmix.planner.graph.dgraph import DrawnStep, TokensOfStep
from torchmix.planner.graph.strategy import backbone_cost, strategy_cache, strategy_of
from torchmix.planner.pack import Packed, Pieces
from torchmix.planner.plan import START_DIGEST, PieceNames, StepPlan, order_digest
from torchmix.planner.stream_order import NO_VIEWS, order_of_stream, stream_fingerprint, tokens_of_streams
from torchmix.recipe.changes import dynamic_of
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of, length_of_step, lengths_of, samples_of_step, stages_of
from torchmix.recipe.sources import flows, longest_of

# --- The planner of a part.
#
# Pieces, samples and order digest depend on the part, the sizes and the cursor alone, never on the layout. Cost: see
# docs/performance.md; the first step after a start makes one window of every stream.
#
#     cursor --draw--> stretches --split, pack--> samples --cost, balance--> StepPlan
#        \______________________________________________________________________ cursor'

UNLIMITED_EPOCHS = 1 << 62
NONE_DENIED: Mapping[str, Int64Array] = {}


class Planner:
    """Plans steps. It holds the part's numbers and the windows used last, and no position."""

    def __init__(
        self,
        part: Part,
        sizes: Mapping[str, SourceSizes],
        layout: Layout | None = None,
        *,
        views: Mapping[str, View] = NO_VIEWS,
        fingerprints: Mapping[str, str] | None = None,
        denied: Mapping[str, Int64Array] = NONE_DENIED,
        earlier: EarlierRows | None = None,
        decisions: DecisionRecords | None = None,
    ) -> None:
        """Prepare to plan.

        Args:
            part: What to plan; `part_of` makes it from a checked recipe.
            sizes: Sizes of each source of the part.
            layout: What the samples are placed on; None: the smallest that holds any step of the part.
            views: Rows of streams that do not have all rows of their source.
            fingerprints: Fingerprint of each source and view, for states to keep; None: states have none.
            denied: Rows that are not given, by source: ascending, each once.
            earlier: Rows that sources and views had before edits; None: not known.
            decisions: The log of the part's policy; None: a function of the step is asked, and with a policy the
                schedule's shares hold, as if it decided nothing.

        Raises:
            TopologyError: The global batch does not divide by the layout, or a document fits no run of its ranks.
            DocumentTooLong: `overflow: error`, and a document exceeds a sample.
            PlanError: A stream would give no tokens at all.
            CatalogMissing: A source has no sizes.
            RecipeError: The model is so large that the cost of a batch exceeds 64 bits; a strategy cannot be imported;
                a module's column of sizes does not exist.
        """
        layout = layout or least_layout(part.balance, part.batch)
        if part.balance.context is None:
            for stage in stages_of(part.batch):
                layout.num_microbatches(stage.samples)
        missing = sorted(set(part.sources) - set(sizes))
        if missing:
            raise CatalogMissing(f"no sizes of source(s) {', '.join(missing)}; run `torchmix index` with this recipe")
        self.part = part
        self.sources = tuple(sorted(part.sources))
        self.layout = layout
        self.streams = tuple(sorted(part.streams))
        self.streams_are_sources = all(stream.is_source for stream in part.streams.values())
        """Whether each stream is a source as it is; then the indices of both are the same."""
        self.sizes = tuple(sizes[name] for name in self.sources)
        """[S] documents and pages of each source."""
        self.denied = {s: denied[name] for s, name in enumerate(self.sources) if name in denied}
        """Rows that are not given, by the number of their source."""
        self.denied_fingerprint = denied_fingerprint({name: denied[name] for name in self.sources if name in denied})
        self._order_of = partial(order_of_stream, part, sizes=sizes, views=views, denied=self.denied)
        first, *longer = lengths_of(part.batch)
        self.orders = self._orders_of(first)
        """[S] orders of the streams; samples may have become longer, which alters no position in them."""
        for length in longer:
            self._orders_of(length)  # refuses now what would fail in a later step
        self.fingerprints = tuple(stream_fingerprint(part.streams[name], fingerprints or {}) for name in self.streams)
        """[streams] a hash of each stream's rows; empty where those of its sources are not known."""
        self.edits = EditedOrders(part, self.orders, sizes, fingerprints or {}, earlier)
        """Which edits of rows the orders follow."""
        flats = {name: of for name, of in self.edits.members.items() if of and part.streams[name].is_flat}
        self.rows = RunRows(
            streams=self.streams,
            fingerprints=self.fingerprints,
            sources=() if self.streams_are_sources else self.sources,
            members=flats,
            denied=self.denied_fingerprint,
        )
        """The names that cursors count, and the fingerprints of their rows."""
        self.streams_with_long_documents = [s for s, order in enumerate(self.orders) if order.has_long_documents]
        """Indices of the streams that have documents of several pieces."""
        self._deciding, self.decisions = dynamic_of(part), decisions
        self.shares_of_step = SharesOfStep(part, tokens_of_streams(part, sizes, views, self.denied))
        if decisions is None and part.dynamic is not None and self._deciding is not None:
            from torchmix.mixture.policies import RecordsOfFunction, function_of_step  # most recipes have no policy

            if function_of_step(part.dynamic) is not None:
                self.decisions = RecordsOfFunction(part.dynamic, self._deciding, self.shares_of_step.in_group)
        epochs = [part.streams[name].max_epochs or UNLIMITED_EPOCHS for name in self.streams]
        self.max_epochs = np.array([min(count, UNLIMITED_EPOCHS) for count in epochs], np.int64)
        """int64 [S] epochs that each stream may give at most."""
        self.most_epochs = dict(zip(self.streams, self.max_epochs.tolist(), strict=True))
        """The same, by name."""
        self.names = PieceNames({name: part.streams[name].sources for name in self.streams}, self.sources)
        """Hashes of the names of streams and sources."""
        for stage in stages_of(part.batch):
            backbone_cost(part).check_fits(num_samples=stage.samples, length=length_of(part.batch, stage))
        self._strategy = strategy_of(part, layout)
        self._kept = strategy_cache(part, self.sources, self.sizes)
        is_exact = part.packing.method in ("concat", "whole")
        self.align_tokens = 1 if is_exact else part.packing.align_tokens
        """A piece takes a multiple of this many tokens in its sample."""
        self._flows = np.array([flows(part.sources[name]) for name in self.sources], np.bool_)
        self._length = first
        self._drawing = Drawing(part, self.orders, self.max_epochs, align_tokens=self.align_tokens)
        self.source_of_stream = self._drawing.source_of_stream
        """int64 [S] the first source of each stream."""
        self._folding = Folding(self)

    def start(self) -> Cursor:
        """The cursor before step 0."""
        return Cursor(
            step=0,
            position=Position.start(len(self.streams)),
            pool=Pieces.empty(),
            order_digest=START_DIGEST,
            drawn=DrawnTokens(),
        )

    def step(self, cursor: Cursor) -> tuple[StepPlan, Cursor]:
        """Plan the step at the cursor.

        Raises:
            SourceExhausted: A stream with `on_exhausted: error` cannot give what it owes, or none can.
        """
        drawn, after = self.drawn(cursor)
        return self.placed(drawn), after

    def drawn(self, cursor: Cursor) -> tuple[DrawnStep, Cursor]:
        """The step at the cursor, packed and not placed; errors as those of `step`."""
        folded = self._folded(cursor)
        return self.drawn_step(cursor, folded.packed, folded.tokens, folded.after.order_digest), folded.after

    def is_decided(self, cursor: Cursor) -> bool:
        """Whether `step` at the cursor would not wait for a decision."""
        after = None if self._deciding is None or self.decisions is None else self._deciding.step_of(cursor.step)
        return after is None or self.decisions is None or self.decisions.is_known(after)

    def placed(self, drawn: DrawnStep) -> StepPlan:
        """The plan of a step whose samples are packed, for this planner's layout."""
        return self._strategy(drawn)

    def tokens_of_step(self, packed: Packed, drawn: Pieces, asked: Int64Array) -> TokensOfStep:
        """What each stream was asked for and gave, from the results of `fold`."""
        return TokensOfStep(asked=asked, drawn=self._by_stream(drawn), pool=self._by_stream(packed.pool))

    def drawn_step(self, before: Cursor, packed: Packed, tokens: TokensOfStep, order_digest: bytes) -> DrawnStep:
        """What a strategy begins with, of the step at a cursor; `order_digest` is that after the step."""
        step = before.step
        num_samples, length = samples_of_step(self.part.batch, step), length_of_step(self.part.batch, step)
        pieces = packed.pieces
        num_labelled = tokens.num_labelled
        if num_labelled is None:
            ends_document = pieces.start + pieces.tokens == pieces.document_tokens
            num_labelled = int(pieces.tokens.sum()) - int(np.count_nonzero(ends_document))
        make = partial(
            StepPlan,
            step=step,
            streams=self.streams,
            sources=self.sources,
            pieces=pieces,
            sample=packed.sample,
            slot=packed.slot,
            sample_offset=packed.sample_offset,
            length=length,
            capacity_tokens=num_samples * length,
            asked_tokens=tokens.asked,
            drawn_tokens=tokens.drawn,
            delivered_tokens=self._by_stream(pieces) if tokens.delivered is None else tokens.delivered,
            pool_tokens=tokens.pool,
            num_tokens_global=num_labelled,
            order_digest=order_digest,
        )
        return DrawnStep(
            step=step,
            packed=packed,
            num_samples=len(pieces) if self.part.packing.method == "whole" else self.layout.num_places(num_samples),
            length=length,
            layout=self.layout,
            schedule=(self.part.mixture, self.part.schedule),
            shares_by="" if self.part.dynamic is None else self.part.dynamic.policy,
            sources=self.sources,
            sizes=self.sizes,
            modules=self.part.modules,
            order_digest=order_digest,
            digest_of=partial(self.order_digest_of, before.order_digest, step),
            make=make,
            kept=self._kept,
        )

    def order_digest_of(self, previous: bytes, step: int, packed: Packed) -> bytes:
        """Order digest of all steps up to one with these samples; `previous`: of those before it."""
        return order_digest(previous, step, packed, self.names.of(packed.pieces))

    def skip(self, cursor: Cursor) -> Cursor:
        """The next cursor, as `step` returns it, without placing the step.

        Raises:
            SourceExhausted: As `step`.
        """
        return self.fold(cursor)[-1]

    def enter(self, eras: Eras) -> None:
        """Make the orders of streams follow edits of their rows; errors as those of `EditedOrders.enter`."""
        if self.edits.enter(eras):
            self._drawing.forget()
            self._folding.forget()

    def fold(self, cursor: Cursor) -> tuple[Packed, Pieces, Int64Array, Cursor]:
        """The result that no layout changes: samples, pieces drawn, tokens asked of each stream, next cursor."""
        folded = self._folded(cursor)
        return folded.packed, folded.drawn(), folded.tokens.asked, folded.after

    def _folded(self, cursor: Cursor) -> FoldedStep:
        """The step by the native fold, or by the reference below where that is not used."""
        found = self._folding.kept(cursor)
        if found is None:
            self.enter(cursor.eras)
            self.cut_for(cursor.step)
            decided, decisions = cursor.decided, self._with_begun(cursor)
            if self._deciding is not None and self.decisions is not None:
                decided = decided_at(cursor.step, decided, self._deciding, self.decisions)
            found = self._folding.at(cursor, decided, decisions) or self._by_reference(cursor, decided, decisions)
        self.edits.forget(found.after.eras)
        return found

    def decides_at(self, step: int) -> bool:
        """Whether what a policy has decided takes hold at a step."""
        return self._deciding is not None and self.decisions is not None and self._deciding.step_of(step) is not None

    def eras_after(self, eras: Eras, position: Position) -> Eras:
        """The edits that are still needed of those before a step; `position`: after it."""
        return still_needed(eras, self.streams, position.epoch, self.max_epochs)

    def _by_reference(self, cursor: Cursor, decided: Decided, decisions: tuple[Decision, ...]) -> FoldedStep:
        new, asked, position, decisions, drawn = self._draw(cursor, decided, decisions)
        self._drawing.follow(cursor.position, position, asked)
        packed = self._pack(cursor, new)
        after = Cursor(
            step=cursor.step + 1,
            position=position,
            pool=packed.pool,
            order_digest=self.order_digest_of(cursor.order_digest, cursor.step, packed),
            decisions=decisions,
            drawn=drawn,
            decided=decided,
            eras=self.eras_after(cursor.eras, position),
        )
        return FoldedStep(packed, lambda: new, self.tokens_of_step(packed, new, asked), after)

    def shares(self, decisions: tuple[Decision, ...], *, step: int, decided: Decided = UNDECIDED) -> Int64Array:
        """int64 [S], sum 2^32: the mixture's shares in a step, without the streams that have run out.

        Raises:
            SourceExhausted: All streams have run out, so nothing can be drawn for `step`.
        """
        shares = self.shares_of_step.at(step, gone_by(decisions), decided.shares, begun_by(decisions))
        if shares is None:
            raise exhausted_error("", 0, step, all_sources=True)
        return shares

    def epochs_before(self, position: Position) -> dict[str, float]:
        """How often each stream was gone through at a position, by name; see `StreamOrder.epochs_before`."""
        places = zip(position.epoch.tolist(), position.window.tolist(), position.offset.tolist(), strict=True)
        of_streams = zip(self.streams, self.orders, places, strict=True)
        return {name: order.epochs_before(*place) for name, order, place in of_streams}

    def shares_asked(self, before: Cursor, after: Cursor) -> Int64Array:
        """int64 [S], sum 2^32: the shares of the step between two cursors, without what had run out before it.

        All 0 in a step of a single pass that only empties the pool.
        """
        gone, begun = gone_by(before.decisions), begun_by(after.decisions)
        shares = self.shares_of_step.at(before.step, gone, after.decided.shares, begun)
        return np.zeros(len(self.streams), np.int64) if shares is None else shares

    def _draw(
        self, cursor: Cursor, decided: Decided, decisions: tuple[Decision, ...]
    ) -> tuple[Pieces, Int64Array, Position, tuple[Decision, ...], DrawnTokens]:
        """Draw what the pool lacks to fill the batch, and top it up until the batch is full.

        The batch is counted in aligned tokens, or in documents where each has a sample of its own.
        """
        length, pads = length_of_step(self.part.batch, cursor.step), self.part.packing.method == "pad"
        capacity = samples_of_step(self.part.batch, cursor.step) * (1 if pads else length)
        position, drawn = cursor.position, cursor.drawn
        asked = np.zeros(len(self.streams), np.int64)
        parts: list[Stretches] = []
        have = 0 if pads else self._drawing.aligned_sum(cursor.pool.tokens)
        # Each further draw asks for a sample or more: a few tokens would fall below every stream's midpoint.
        num_streams = self.shares_of_step.num_with_share
        while have < capacity and not (self.part.one_pass and have and len(gone_by(decisions)) == num_streams):
            shares = self.shares(decisions, step=cursor.step, decided=decided)
            if pads:
                more, drawn = self._drawing.documents(position, shares, capacity - have, drawn)
                have += len(more.stretches.row)
            else:
                need = max(capacity - have, length if parts else 0)
                more, raw, aligned = self._drawing.draw(position, shares, need, drawn, capacity)
                drawn = drawn.plus(raw, aligned)
                have += aligned
            position = more.position
            asked += more.asked
            parts.append(more.stretches)
            for s in more.ran_out:
                name = self.streams[s]
                if self.part.streams[name].on_exhausted == "error":
                    raise exhausted_error(name, int(self.max_epochs[s]), cursor.step, all_sources=False)
                decisions = (*decisions, Decision(step=cursor.step, kind="ran_out", name=name))
        drew = parts[0] if len(parts) == 1 else joined(parts)
        return self._drawing.pieces_of(cursor.step, drew), asked, position, decisions, drawn

    def _orders_of(self, length: int) -> tuple[StreamOrder, ...]:
        """The streams' orders for samples of so many tokens."""
        return tuple(self._order_of(name=name, length=length) for name in self.streams)

    def cut_for(self, step: int) -> None:
        """Have documents cut for the samples of a step."""
        length = length_of_step(self.part.batch, step)
        if length != self._length:  # what earlier draws have kept is cut for other samples
            self._length, self.orders = length, self._orders_of(length)
            self.edits.take(self.orders)
            self._drawing = Drawing(self.part, self.orders, self.max_epochs, align_tokens=self.align_tokens)

    def _with_begun(self, cursor: Cursor) -> tuple[Decision, ...]:
        """The decisions, with the stages of the schedule that begin at an epoch and with this step."""
        places = self.shares_of_step.places
        if not places.have_epochs:
            return cursor.decisions
        epochs = dict(zip(self.streams, cursor.position.epoch.tolist(), strict=True))
        due = places.due(cursor.step, begun_by(cursor.decisions), epochs)
        return (*cursor.decisions, *(Decision(step=s, kind="stage", name=of, epochs=n) for of, n, s in due))

    def _pack(self, cursor: Cursor, drawn: Pieces) -> Packed:
        packing, length = self.part.packing, length_of_step(self.part.batch, cursor.step)
        seed, step = self.part.seed, cursor.step
        num_samples = samples_of_step(self.part.batch, step)
        numbers = pack.sample_numbers(seed=seed, step=step, num_samples=num_samples)
        if packing.method == "concat":
            tie = self._hashes(step, drawn)
            packed = pack.concat(cursor.pool, drawn, tie, num_samples=num_samples, length=length)
        elif packing.method == "pad":
            packed = pack.pad(pack.split_long(drawn, self.cuts(length)[drawn.source]))
        else:
            cuts = self.cuts(length)
            pool, drawn = (pack.split_long(each, cuts[each.source]) for each in (cursor.pool, drawn))
            both, num_deferred = Pieces.concatenate([pool, drawn]), len(pool)
            tie = self._hashes(step, both)
            if packing.method == "whole":
                return pack.whole(both, tie, capacity_tokens=num_samples * length, seed=seed, step=step)
            sizes = {"num_samples": num_samples, "length": length, "align_tokens": self.align_tokens}
            if not self._flows.any():
                return pack.best_fit(both, num_deferred, tie, **sizes, step=step, number_of_sample=numbers)
            is_cut, hashes = self._flows[both.source], partial(self._hashes, step)
            return pack.fill(
                both, is_cut, num_deferred, tie, hashes=hashes, **sizes, step=step, number_of_sample=numbers
            )
        return pack.renumber(packed, numbers)

    def cuts(self, length: int) -> Int64Array:
        """int64 [sources] at which multiples of tokens documents of each, by sorted name, are cut; 0: they flow.

        Args:
            length: Tokens of a sample.
        """
        longest = [longest_of(self.part.sources[name], length) for name in self.sources]
        return np.where(self._flows, 0, np.array(longest, np.int64))

    def _hashes(self, step: int, pieces: Pieces) -> NDArray[np.uint64]:
        return pack.piece_hashes(self.part.seed, step, self.names.of(pieces), pieces)

    def _by_stream(self, pieces: Pieces) -> Int64Array:
        sums = np.zeros(len(self.streams), np.int64)
        np.add.at(sums, pieces.stream, pieces.tokens)
        return sums


def open_planner(
    part: Part, catalog: Catalog, layout: Layout | None = None, *, decisions: DecisionRecords | None = None
) -> Planner:
    """A planner over an opened catalog; see `Planner`."""
    sizes = {name: source.sizes for name, source in catalog.sources.items()}
    fingerprints = {name: source.fingerprint for name, source in catalog.sources.items()}
    fingerprints |= {name: view.fingerprint for name, view in catalog.views.items()}
    return Planner(
        part,
        sizes,
        layout,
        views=catalog.views,
        fingerprints=fingerprints,
        denied=catalog.denied_rows,
        earlier=EarlierRows(catalog, settings_of(part.sources, part.shuffle), part.name),
        decisions=decisions,
    )


# --- Which documents the coming steps continue.
#
# No later step asks for an earlier token of these documents. Cost: a search in the window of each source that has long
# documents, and has moved since the cursor before.


class DocumentsToCome(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Documents that later steps continue. All arrays int64 [n]; each (source, row) once."""

    source: Int64Array
    """Index by sorted source name."""
    row: Int64Array
    start: Int64Array
    """The first token that is still to come."""


class BegunDocuments:
    """Follows the cursors of a planner; what is remembered of the one before decides nothing."""

    def __init__(self, planner: Planner) -> None:
        """Nothing is followed yet."""
        self._planner = planner
        self._streams = np.array(planner.streams_with_long_documents, np.int64)
        self._place = np.full((3, len(self._streams)), -1, np.int64)
        """Epoch, window and offset of these streams, as they were last."""
        self._drawn_in_part: dict[int, tuple[int, int, int]] = {}
        """By stream: source, row and next token."""

    def at(self, cursor: Cursor) -> DocumentsToCome:
        """The documents of which some pieces were given and others were not.

        Args:
            cursor: The cursor after a step.
        """
        self._follow(cursor)
        return _to_come(self._planner, cursor, [*self._drawn_in_part.values()])

    def _follow(self, cursor: Cursor) -> None:
        position, streams = cursor.position, self._streams
        place = np.array([position.epoch[streams], position.window[streams], position.offset[streams]])
        has_moved = (place != self._place).any(axis=0)
        self._place = place
        for s, (epoch, window, offset) in zip(streams[has_moved].tolist(), place[:, has_moved].T.tolist(), strict=True):
            document = self._planner.orders[s].open_document(epoch, window, offset) if offset > 0 else None
            if document is None:
                self._drawn_in_part.pop(s, None)
            else:
                self._drawn_in_part[s] = document


def _to_come(planner: Planner, cursor: Cursor, found: list[tuple[int, int, int]]) -> DocumentsToCome:
    """The documents drawn in part, which are found already, and those with deferred pieces."""
    pool = cursor.pool
    if len(pool):
        is_begun = pool.start > 0  # `concat` cuts any document
        if planner.streams_with_long_documents:
            is_begun |= pool.document_tokens > planner.cuts(planner.part.batch.length)[pool.source]
        found += zip(*(column[is_begun].tolist() for column in (pool.source, pool.row, pool.start)), strict=True)
    first: dict[tuple[int, int], int] = {}
    for source, row, start in found:
        first[source, row] = min(start, first.get((source, row), start))
    table = np.array([(*place, start) for place, start in first.items()], np.int64).reshape(-1, 3)
    return DocumentsToCome(source=table[:, 0], row=table[:, 1], start=table[:, 2])
