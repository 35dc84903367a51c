"""What each source will give in N steps: the plan, run ahead without data."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceExhausted
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.shares import SHARE_ONE, Begun
from torchmix.planner.cursor import Cursor, begun_by, gone_by
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.planner.stream_order import DOCUMENT_CHARGE, epoch_tokens
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step, samples_before, stages_of, tokens_before
from torchmix.recipe.structs import Batch

# --- What each source will give in N steps, from the run's beginning or a state on, as numbers.
#
# It says which of its numbers are exact.

LOW_FILL = 0.8
"""A batch that is filled by less is a finding."""
SIMULATED_STEPS = 1000
"""Steps that are planned in full before rates take over."""


class ModuleSums:
    """What a module computes and what of it travels, summed over the steps added."""

    def __init__(self) -> None:
        self._unit, self._num_consumers = "", 0
        self._num_steps = self._num_items = self._cost = self._lower_bound = self._hash_order_cost = 0
        self._rows = self._away = self._left_text = self._hash_order = 0

    def add(self, plan: StepPlan, name: str) -> None:
        """Count the module of a step."""
        module = plan.item_modules[name]
        self._unit, self._num_consumers = module.unit, module.num_consumers
        self._num_steps += 1
        self._num_items += len(module.items)
        self._cost += module.balance.cost
        self._lower_bound += module.balance.lower_bound
        self._hash_order_cost += module.balance.hash_order_cost
        self._rows += int(module.items.tokens.sum())
        self._away += plan.rows_that_travel(name)
        self._left_text += module.balance.left_text
        self._hash_order += module.balance.took_hash_order

    def values(self) -> dict[str, Any]:
        """The sums for a program: `rows` are what the module gives; `steps_left_text` and `steps_in_hash_order` count
        the steps that fell back."""
        return {
            "items": self._unit,
            "num_consumers": self._num_consumers,
            "num_steps": self._num_steps,
            "num_items": self._num_items,
            "balance_ratio": self._cost / self._lower_bound,
            "hash_order_ratio": self._hash_order_cost / self._lower_bound,
            "rows": self._rows,
            "rows_that_travel": self._away,
            "steps_left_text": self._left_text,
            "steps_in_hash_order": self._hash_order,
        }


class SourceForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One source over N steps."""

    name: str
    share: float
    """Part of the trained tokens, as the recipe has it, whatever runs out in these steps."""
    asked_share: float
    """The mean of the shares that are asked of it in these steps, or until the data ends; 0 once it has run out."""
    epoch_tokens: int
    """Tokens that one epoch gives, after the recipe's overflow rule."""
    first_step: int | None
    """Step of its first token in these steps, estimated also beyond N; None if the data ends before."""
    delivered_tokens: int
    """Tokens that it gives in all N steps, or until the data ends."""
    epochs: float
    """Passes over the source since step 0 until then."""
    runs_out_step: int | None
    """First step that asks for more than `max_epochs`, maybe before these; None if there is none until their end."""
    most_repeats: int
    """Most times that one document came in one of the simulated steps."""
    deviation: float
    """By how much its part of a step differs from its share, over the share: mean of the simulated steps before any
    source ran out."""
    piece_tokens: float
    """Tokens of a piece, mean of those delivered in the simulated steps; 0 if there are none."""


class StageForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Where a change of the schedule lies in the run."""

    start: int
    """The step with which it begins."""
    stop: int
    """The first step that has the new shares alone; `start` where they hold at once."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """N steps of a run."""

    start: int
    """The first of them."""
    num_steps: int
    simulated_steps: int
    """How many, the first ones, were planned, so that every number is exact."""
    stop_step: int | None
    """Step that cannot be planned, because a source ran out and the recipe says `error`, or all did."""
    stop_is_exact: bool
    """The planner itself came to `stop_step`."""
    capacity_tokens: int
    """Tokens that a step has room for, mean of all N."""
    fill: float
    """Tokens over capacity, mean of the simulated steps."""
    lowest_fill: float
    """The fill of the simulated step with the fewest tokens."""
    lowest_fill_step: int
    num_low_fills: int
    """Simulated steps below `LOW_FILL`."""
    overdraw_tokens: int
    """Most tokens that waited after a simulated step, plus what it had beyond its capacity."""
    alignment: float
    """Tokens of all documents drawn in the simulated steps over what they take when rounded up to `align_tokens`."""
    sources: tuple[SourceForecast, ...]
    """By sorted name; without cells that have no rows."""
    modules: Mapping[str, Mapping[str, Any]]
    """`ModuleSums.values` of each module, over the simulated steps, in the layout that they were planned for."""
    last: tuple[bytes, StepPlan] | None
    """The last simulated step, and the order digest before it."""
    stages: tuple[StageForecast | None, ...]
    """Each change of the schedule, maybe before these steps or behind them; None of one at an epoch that does not come
    until their end, or that a later change has overtaken."""

    def is_exact(self, step: int) -> bool:
        """What happens in this step was planned, not estimated."""
        return step < self.start + self.simulated_steps or (self.stop_is_exact and step == self.stop_step)


# --- The first steps of a run, or those after a state, planned in full.
#
# The steps are those of the run, since the same planner makes them. Cost: the planning of each step.


class Seen(msgspec.Struct, kw_only=True, eq=False):
    """Sums over the steps so far; arrays are [S] by sorted name."""

    planner: Planner
    start: int
    """The first step."""
    gone: frozenset[str]
    """Streams that had run out before it."""
    cursor: Cursor
    epoch_tokens: NDArray[np.int64]
    delivered: NDArray[np.float64]
    drawn: NDArray[np.float64]
    """Since step 0; those before `start` by windows."""
    asked: NDArray[np.float64]
    """Sum over the steps of the tokens of a step times its shares."""
    most_repeats: NDArray[np.int64]
    deviation: NDArray[np.float64]
    """Sum over `shared_steps` of how far each source's part of a step is from its share, over the share."""
    document_tokens: NDArray[np.float64]
    """Mean tokens of the documents of each where shares count documents, else 1."""
    piece_tokens: NDArray[np.int64]
    num_pieces: NDArray[np.int64]
    first_step: dict[int, int]
    runs_out_step: dict[int, int]
    begun: Begun
    """Entries of the schedule at an epoch that have begun."""
    steps: int
    """The step to plan next."""
    last: tuple[bytes, StepPlan] | None = None
    """The step before it, and the order digest before that."""
    modules: dict[str, ModuleSums] = msgspec.field(default_factory=dict)
    simulated_tokens: int = 0
    asked_tokens: float = 0.0
    """Tokens of the steps of `asked` together."""
    stop_step: int | None = None
    shared_steps: int = 0
    """Steps before any further source ran out."""
    lowest_fill: float = 1.0
    lowest_fill_step: int = 0
    num_low_fills: int = 0
    overdraw_tokens: int = 0


def patient(part: Part) -> Part:
    """A part that a forecast plans with.

    With `renormalise` everywhere the plan is the same up to the first step that runs out, and the decision it logs
    names the source and the step.
    """
    streams = {name: replace(each, on_exhausted="renormalise") for name, each in part.streams.items()}
    return replace(part, streams=streams)


def simulate(planner: Planner, cursor: Cursor, part: Part, num_steps: int, progress: Callable[[], object]) -> Seen:
    names = planner.streams
    planner.enter(cursor.eras)
    planner.cut_for(cursor.step)
    of_epoch = np.array([epoch_tokens(order, planner.sizes, planner.denied) for order in planner.orders], np.int64)
    epochs = planner.epochs_before(cursor.position)
    ran_out = [one for one in cursor.decisions if one.kind == "ran_out"]
    seen = Seen(
        planner=planner,
        start=cursor.step,
        gone=gone_by(cursor.decisions),
        cursor=cursor,
        epoch_tokens=of_epoch,
        delivered=np.zeros(len(names)),
        drawn=np.array([epochs[name] for name in names]) * of_epoch,
        asked=np.zeros(len(names)),
        most_repeats=np.zeros(len(names), np.int64),
        deviation=np.zeros(len(names)),
        document_tokens=np.array([_mean_tokens(order) if part.counts_documents else 1.0 for order in planner.orders]),
        piece_tokens=np.zeros(len(names), np.int64),
        num_pieces=np.zeros(len(names), np.int64),
        first_step={},
        runs_out_step={names.index(one.name): one.step for one in ran_out},
        begun=begun_by(cursor.decisions),
        steps=cursor.step,
    )
    for step in range(cursor.step, cursor.step + num_steps):
        try:
            plan, cursor = planner.step(seen.cursor)
        except SourceExhausted:
            seen.stop_step = step
            seen.runs_out_step |= {s: step for s in range(len(names)) if s not in seen.runs_out_step}
            break
        for decision in cursor.decisions[len(seen.cursor.decisions) :]:
            if decision.kind == "stage":
                seen.begun += begun_by((decision,))
                continue
            seen.runs_out_step[names.index(decision.name)] = step
            if part.streams[decision.name].on_exhausted == "error":
                seen.stop_step = step
        if seen.stop_step is not None:
            break
        _add_step(seen, plan, cursor)
        progress()
    return seen


def _add_step(seen: Seen, plan: StepPlan, cursor: Cursor) -> None:
    for s in np.flatnonzero(plan.delivered_tokens).tolist():
        seen.first_step.setdefault(s, plan.step)
    seen.delivered += plan.delivered_tokens
    seen.drawn += plan.drawn_tokens
    np.maximum(seen.most_repeats, _repeats(plan), out=seen.most_repeats)
    seen.piece_tokens += plan.delivered_tokens
    seen.num_pieces += np.bincount(plan.pieces.stream, minlength=len(plan.streams))
    seen.last = seen.cursor.order_digest, plan
    for name in plan.item_modules:
        seen.modules.setdefault(name, ModuleSums()).add(plan, name)
    total = int(plan.delivered_tokens.sum())
    asked = seen.planner.shares_asked(seen.cursor, cursor) / SHARE_ONE
    seen.asked += asked * plan.capacity_tokens
    seen.asked_tokens += plan.capacity_tokens if asked.any() else 0
    shares = None if len(seen.runs_out_step) > len(seen.gone) else shares_in(seen, plan.step)
    if shares is not None:
        away = np.abs(plan.delivered_tokens / total - shares)
        seen.deviation += np.divide(away, shares, out=np.zeros(len(shares)), where=shares > 0)
        seen.shared_steps += 1
    fill = total / plan.capacity_tokens
    seen.num_low_fills += fill < LOW_FILL
    seen.overdraw_tokens = max(seen.overdraw_tokens, total + int(plan.pool_tokens.sum()) - plan.capacity_tokens)
    if fill < seen.lowest_fill:
        seen.lowest_fill, seen.lowest_fill_step = fill, plan.step
    seen.simulated_tokens += total
    seen.cursor, seen.steps = cursor, plan.step + 1


def _repeats(plan: StepPlan) -> NDArray[np.int64]:
    """[S] most times that one document of the source begins in this step."""
    begins = plan.pieces.start == 0
    pieces = plan.pieces.take(begins)
    stream, epoch, count = pieces.stream, pieces.epoch, len(plan.streams)
    first_epoch, last_epoch = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    np.minimum.at(first_epoch, stream, epoch)
    np.maximum.at(last_epoch, stream, epoch)
    repeats = (last_epoch >= 0).astype(np.int64)
    # Only a stream in which an epoch ends within the step can give a document twice.
    for s in np.flatnonzero(first_epoch < last_epoch).tolist():
        places = np.stack([pieces.source[stream == s], pieces.row[stream == s]])
        repeats[s] = np.unique(places, axis=1, return_counts=True)[1].max()
    return repeats


def _mean_tokens(order: StreamOrder) -> float:
    """Tokens of a document of a stream that has some, on average."""
    counted = [order.counted(block) for block in order.space.lengths()]
    documents = sum(int(np.count_nonzero(block)) for block in counted)
    return sum(int(block.sum(dtype=np.int64)) for block in counted) / max(documents, 1)


def asked_in(seen: Seen, start: int, stop: int) -> Int64Array | None:
    """int64 [S], sum 2^32: the mean shares of steps, without what has run out; None where nothing is left."""
    gone = frozenset(seen.planner.streams[s] for s in seen.runs_out_step)
    return seen.planner.shares_of_step.mean(start, stop, gone, seen.cursor.decided.shares, seen.begun)


def shares_in(seen: Seen, step: int) -> NDArray[np.float64] | None:
    """[S] shares of the tokens of a step, without what has run out; None where nothing is left."""
    shares = asked_in(seen, step, step + 1)
    if shares is None:
        return None
    tokens: NDArray[np.float64] = shares * seen.document_tokens
    return np.asarray(tokens / tokens.sum(), np.float64)


# --- The rest of a run, at the rate of its first steps.
#
# What runs out, and changes of the shares, count from where they happen. Cost: one stride from each such place to the
# next.


def extrapolate(part: Part, seen: Seen, end: int) -> None:
    """Carry the sums on to step `end` at the rate of the simulated steps, from one run-out to the next.

    Time is counted in samples, since a step may grow.
    """
    names, batch = seen.planner.streams, part.batch
    places = seen.planner.shares_of_step.places
    borders = _borders(seen, end)
    # What is delivered, not what is drawn: in the first steps the draw also fills the pool.
    now, stop = float(samples_before(batch, seen.steps)), float(samples_before(batch, end))
    fill = seen.simulated_tokens / max(tokens_before(batch, seen.steps) - tokens_before(batch, seen.start), 1)
    most = np.array([float(part.streams[name].max_epochs or math.inf) for name in names])
    an_epoch = np.maximum(seen.epoch_tokens, 1)  # a cell without rows has none, and no share
    most *= an_epoch
    wait = {s: _wait(seen, s) for s in range(len(names)) if s not in seen.first_step and seen.epoch_tokens[s]}
    while now < stop and seen.stop_step is None:
        shares = shares_in(seen, _step_at(batch, now))
        if shares is None:
            seen.stop_step = _step_at(batch, now)
            if samples_before(batch, seen.stop_step) < now:
                seen.stop_step += 1
            break
        rate = shares * fill * length_of_step(batch, _step_at(batch, now))
        left = np.divide(np.maximum(most - seen.drawn, 0), rate, out=np.full(len(rate), math.inf), where=rate > 0)
        behind = bisect_right(borders, now)  # the shares are those of `now` up to the next border
        stride = min(stop - now, float(left.min()), *(border - now for border in borders[behind : behind + 1]))
        if places.have_epochs:
            begins = (np.floor(seen.drawn / an_epoch + 1e-9) + 1) * an_epoch - seen.drawn
            at_epoch = np.divide(begins, rate, out=np.full(len(rate), math.inf), where=rate > 0)
            stride = min(stride, float(at_epoch[[names.index(name) for name in places.streams]].min()))
        for s in wait:
            if s not in seen.first_step and wait[s] < rate[s] * stride:
                seen.first_step[s] = _step_at(batch, now + wait[s] / rate[s])
            wait[s] -= float(rate[s]) * stride
        _add_asked(seen, now, stride)
        seen.drawn += rate * stride
        seen.delivered += rate * stride
        now += stride
        if places.have_epochs:
            epochs = {name: int(seen.drawn[s] / an_epoch[s] + 1e-9) for s, name in enumerate(names)}
            step = _step_at(batch, now) + 1
            if due := places.due(step, seen.begun, epochs):
                seen.begun += due
                borders = _borders(seen, end)
        for s in np.flatnonzero((left <= stride) & (now < stop)).tolist():
            seen.runs_out_step[s] = _step_at(batch, now)
            if part.streams[names[s]].on_exhausted == "error":
                seen.stop_step = _step_at(batch, now)
    shares = shares_in(seen, end) if seen.stop_step is None else None
    if shares is not None:
        rate = shares * fill * length_of_step(batch, end)
        late = {s: _step_at(batch, now + wait[s] / rate[s]) for s in wait if s not in seen.first_step and rate[s] > 0}
        seen.first_step |= late


def _add_asked(seen: Seen, now: float, stride: float) -> None:
    """Add the shares of some samples, over which only ramps change them, to the sums."""
    batch = seen.planner.part.batch
    first = _step_at(batch, now)
    shares = asked_in(seen, first, max(first + 1, _step_at(batch, now + stride)))
    if shares is not None:
        tokens = stride * length_of_step(batch, first)
        seen.asked += shares / SHARE_ONE * tokens
        seen.asked_tokens += tokens


def _borders(seen: Seen, end: int) -> list[int]:
    """Samples at which the shares change, as far as it is known, or the batch."""
    batch = seen.planner.part.batch
    steps = {*seen.planner.shares_of_step.borders(end, seen.begun), *(one.from_step for one in stages_of(batch))}
    return [samples_before(batch, step) for step in sorted(steps) if 0 < step < end]


def _step_at(batch: Batch, samples: float) -> int:
    """The step that a sample belongs to, by the samples before it."""
    stage = [stage for stage in stages_of(batch) if samples_before(batch, stage.from_step) <= samples][-1]
    return stage.from_step + math.floor((samples - samples_before(batch, stage.from_step)) / stage.samples)


def _wait(seen: Seen, s: int) -> float:
    """Tokens that a source is charged before it gives its next document: half of the document, less the debt."""
    position, order = seen.cursor.position, seen.planner.orders[s]
    owed = float(position.debt[s]) + float(position.residue[s]) / 2**32
    if seen.planner.part.counts_documents:
        return max(0.5 - owed / DOCUMENT_CHARGE, 0.0) * float(seen.document_tokens[s])
    window, at = order.window(int(position.epoch[s]), int(position.window[s])), int(position.offset[s])
    before = window.tokens_before(at)
    while at < window.num_pieces and window.tokens_before(at) == before:
        at += 1
    return max((window.tokens_before(at) - before) / 2 - owed, 0.0)


# --- The forecast of a part: its first steps planned, the rest at their rate.
#
# Up to `simulated_steps` every number is that of the real plan, since the same planner makes it; beyond, numbers are
# expected ones, at the rate of the steps planned. Cost: `simulated_steps` times the planning time of a step.

MOST_STEPS = 1 << 48
"""Beyond the last step of any run."""


def forecast(
    part: Part,
    planner: Planner,
    num_steps: int,
    *,
    cursor: Cursor | None = None,
    simulated_steps: int = SIMULATED_STEPS,
    progress: Callable[[], object] = lambda: None,
) -> Forecast:
    """Run the plan ahead.

    Args:
        part: What is planned.
        planner: The planner of `patient(part)`, which stops for no stream that runs out.
        num_steps: N, at least 1.
        cursor: Where the run stands; None: at its beginning. What a policy has decided by then holds in all N steps.
        simulated_steps: Most steps to plan in full.
        progress: Called after each of them.
    """
    cursor = planner.start() if cursor is None else cursor
    seen = simulate(planner, cursor, part, min(num_steps, simulated_steps), progress)
    stop_is_exact = seen.stop_step is not None
    end = seen.start + num_steps
    extrapolate(part, seen, end)
    decided = cursor.decided.shares
    shares = planner.shares_of_step.mean(seen.start, end, seen.gone, decided, seen.begun)
    of_epoch = seen.epoch_tokens
    asked = seen.asked / max(seen.asked_tokens, 1.0)
    sources = tuple(
        SourceForecast(
            name=name,
            share=0.0 if shares is None else float(shares[s]) / SHARE_ONE,
            asked_share=float(asked[s]),
            epoch_tokens=int(of_epoch[s]),
            first_step=seen.first_step.get(s),
            delivered_tokens=int(seen.delivered[s]),
            epochs=float(seen.drawn[s] / of_epoch[s]),
            runs_out_step=seen.runs_out_step.get(s),
            most_repeats=int(seen.most_repeats[s]),
            deviation=float(seen.deviation[s]) / max(seen.shared_steps, 1),
            piece_tokens=float(seen.piece_tokens[s] / max(seen.num_pieces[s], 1)),
        )
        for s, name in enumerate(planner.streams)
        if of_epoch[s]
    )
    before = tokens_before(part.batch, seen.start)
    simulated_tokens = tokens_before(part.batch, seen.steps) - before
    return Forecast(
        start=seen.start,
        num_steps=num_steps,
        simulated_steps=seen.steps - seen.start,
        stop_step=seen.stop_step,
        stop_is_exact=stop_is_exact,
        capacity_tokens=(tokens_before(part.batch, end) - before) // num_steps,
        fill=seen.simulated_tokens / simulated_tokens if simulated_tokens else 0.0,
        lowest_fill=seen.lowest_fill,
        lowest_fill_step=seen.lowest_fill_step,
        num_low_fills=seen.num_low_fills,
        overdraw_tokens=seen.overdraw_tokens,
        alignment=1.0 if part.counts_documents else seen.cursor.drawn.raw / seen.cursor.drawn.aligned,
        sources=sources,
        last=seen.last,
        modules={name: sums.values() for name, sums in seen.modules.items()},
        stages=tuple(_stage(part.batch, place) for place in planner.shares_of_step.places.at(seen.begun)),
    )


def _stage(batch: Batch, place: tuple[int, int] | None) -> StageForecast | None:
    """The steps of a change, by the tokens of the run between which it lies."""
    if place is None:
        return None
    begin, end = place
    before = partial(tokens_before, batch)
    start = bisect_right(range(MOST_STEPS), begin, key=before) - 1
    stop = bisect_left(range(MOST_STEPS), end, key=before)
    return StageForecast(start=start, stop=max(start, stop))
