"""What each source will give in N steps: the plan, run ahead without data.

In: a checked recipe, the sizes of its sources, and N. Out: for each source its first step, tokens, epochs, the step at
which it runs out, and how often one document comes in a step. Must hold: up to `simulated_steps` every number is that
of the real plan, since the same planner makes it; beyond, numbers are expected ones, at the rate of the steps planned.
Cost: `simulated_steps` times the planning time of a step.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.store import View
from torchmix.errors import SourceExhausted
from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.mixture.shares.places import NONE_BEGUN, Begun
from torchmix.planner.cursor import Cursor
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import NONE_DENIED, Planner
from torchmix.planner.stream_order import NO_VIEWS, epoch_tokens
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import samples_before, stages_of
from torchmix.recipe.structs import Batch

LOW_FILL = 0.8
"""A batch that is filled by less is a finding."""
SIMULATED_STEPS = 1000
"""Steps that are planned in full before rates take over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceForecast:
    """One source over N steps."""

    name: str
    share: float
    """Part of the trained tokens, as the recipe has it."""
    epoch_tokens: int
    """Tokens that one epoch gives, after the recipe's overflow rule."""
    first_step: int | None
    """Step of its first token, estimated also beyond N; None if the data ends before."""
    delivered_tokens: int
    """Tokens that it gives in all N steps, or until the data ends."""
    epochs: float
    """Passes over the source until then."""
    runs_out_step: int | None
    """First step that asks for more than `max_epochs`; None if there is none in N steps."""
    most_repeats: int
    """Most times that one document came in one of the simulated steps."""
    deviation: float
    """By how much its part of a step differs from its share, over the share: mean of the simulated steps before any
    source ran out."""
    piece_tokens: float
    """Tokens of a piece, mean of those delivered in the simulated steps; 0 if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A run of N steps."""

    num_steps: int
    simulated_steps: int
    """The first steps, for which every number is exact."""
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
    alignment: float
    """Tokens of all documents drawn in the simulated steps over what they take when rounded up to `align_tokens`."""
    sources: tuple[SourceForecast, ...]
    """By sorted name; without cells that have no rows."""
    begun: tuple[int | None, ...]
    """First step of each change of the schedule that begins at an epoch, in their order; None: not in N steps."""

    def is_exact(self, step: int) -> bool:
        """What happens in this step was planned, not estimated."""
        return step < self.simulated_steps or (self.stop_is_exact and step == self.stop_step)


def forecast(
    part: Part,
    sizes: Mapping[str, SourceSizes],
    num_steps: int,
    *,
    views: Mapping[str, View] = NO_VIEWS,
    denied: Mapping[str, Int64Array] = NONE_DENIED,
    simulated_steps: int = SIMULATED_STEPS,
    progress: Callable[[], object] = lambda: None,
) -> Forecast:
    """Run the plan ahead.

    Args:
        part: What is planned.
        sizes: Sizes of each of its sources.
        num_steps: N, at least 1.
        views: Rows of streams that do not have all rows of their source.
        denied: Rows that are not given, by source.
        simulated_steps: Most steps to plan in full.
        progress: Called after each of them.

    Raises:
        PlanError: What the planner refuses from the start: a source without tokens, a document too long.
    """
    seen = _simulate(_patient_planner(part, sizes, views, denied), part, min(num_steps, simulated_steps), progress)
    stop_is_exact = seen.stop_step is not None
    _extrapolate(part, seen, num_steps)
    shares = seen.planner.shares_of_step.mean(0, max(1, num_steps), begun=seen.begun)
    assert shares is not None, "a checked recipe gives some source a share"
    sources = tuple(
        SourceForecast(
            name=name,
            share=float(shares[s]) / SHARE_ONE,
            epoch_tokens=int(seen.epoch_tokens[s]),
            first_step=seen.first_step.get(s),
            delivered_tokens=int(seen.delivered[s]),
            epochs=float(seen.drawn[s] / seen.epoch_tokens[s]),
            runs_out_step=seen.runs_out_step.get(s),
            most_repeats=int(seen.most_repeats[s]),
            deviation=float(seen.deviation[s]) / max(seen.shared_steps, 1),
            piece_tokens=float(seen.piece_tokens[s] / max(seen.num_pieces[s], 1)),
        )
        for s, name in enumerate(seen.planner.streams)
        if seen.epoch_tokens[s]
    )
    length = part.batch.length
    return Forecast(
        num_steps=num_steps,
        simulated_steps=seen.steps,
        stop_step=seen.stop_step,
        stop_is_exact=stop_is_exact,
        capacity_tokens=samples_before(part.batch, num_steps) * length // num_steps,
        fill=seen.simulated_tokens / (samples_before(part.batch, seen.steps) * length) if seen.steps else 0.0,
        lowest_fill=seen.lowest_fill,
        lowest_fill_step=seen.lowest_fill_step,
        num_low_fills=seen.num_low_fills,
        alignment=seen.cursor.drawn.raw / seen.cursor.drawn.aligned,
        sources=sources,
        begun=seen.planner.shares_of_step.places.first_steps(seen.begun),
    )


@dataclass(kw_only=True, slots=True, eq=False)
class _Seen:
    """Sums over the steps so far; arrays are [S] by sorted name."""

    planner: Planner
    cursor: Cursor
    epoch_tokens: NDArray[np.int64]
    delivered: NDArray[np.float64]
    drawn: NDArray[np.float64]
    most_repeats: NDArray[np.int64]
    deviation: NDArray[np.float64]
    """Sum over `shared_steps` of how far each source's part of a step is from its share, over the share."""
    piece_tokens: NDArray[np.int64]
    num_pieces: NDArray[np.int64]
    first_step: dict[int, int]
    runs_out_step: dict[int, int]
    begun: Begun = NONE_BEGUN
    """Entries of the schedule at an epoch that have begun."""
    steps: int = 0
    simulated_tokens: int = 0
    stop_step: int | None = None
    shared_steps: int = 0
    """Steps before any source ran out."""
    lowest_fill: float = 1.0
    lowest_fill_step: int = 0
    num_low_fills: int = 0


def _patient_planner(
    part: Part, sizes: Mapping[str, SourceSizes], views: Mapping[str, View], denied: Mapping[str, Int64Array]
) -> Planner:
    # With `renormalise` everywhere the plan is the same up to the first step that runs out, and the
    # decision it logs names the source and the step.
    patient = {name: dataclasses.replace(each, on_exhausted="renormalise") for name, each in part.streams.items()}
    return Planner(dataclasses.replace(part, streams=patient), sizes, views=views, denied=denied)


def _simulate(planner: Planner, part: Part, num_steps: int, progress: Callable[[], object]) -> _Seen:
    names = planner.streams
    seen = _Seen(
        planner=planner,
        cursor=planner.start(),
        epoch_tokens=np.array(
            [epoch_tokens(order, planner.sizes, planner.denied) for order in planner.orders], np.int64
        ),
        delivered=np.zeros(len(names)),
        drawn=np.zeros(len(names)),
        most_repeats=np.zeros(len(names), np.int64),
        deviation=np.zeros(len(names)),
        piece_tokens=np.zeros(len(names), np.int64),
        num_pieces=np.zeros(len(names), np.int64),
        first_step={},
        runs_out_step={},
    )
    for step in range(num_steps):
        try:
            plan, cursor = planner.step(seen.cursor)
        except SourceExhausted:
            seen.stop_step = step
            seen.runs_out_step |= {s: step for s in range(len(names)) if s not in seen.runs_out_step}
            break
        for decision in cursor.decisions[len(seen.cursor.decisions) :]:
            if decision.kind == "stage":
                seen.begun += ((decision.name, step),)
                continue
            seen.runs_out_step[names.index(decision.name)] = step
            if part.streams[decision.name].on_exhausted == "error":
                seen.stop_step = step
        if seen.stop_step is not None:
            break
        _add_step(seen, plan, cursor)
        progress()
    return seen


def _add_step(seen: _Seen, plan: StepPlan, cursor: Cursor) -> None:
    for s in np.flatnonzero(plan.delivered_tokens).tolist():
        seen.first_step.setdefault(s, plan.step)
    seen.delivered += plan.delivered_tokens
    seen.drawn += plan.drawn_tokens
    np.maximum(seen.most_repeats, _repeats(plan), out=seen.most_repeats)
    seen.piece_tokens += plan.delivered_tokens
    seen.num_pieces += np.bincount(plan.pieces.stream, minlength=len(plan.streams))
    total = int(plan.delivered_tokens.sum())
    shares = None if seen.runs_out_step else _shares(seen, plan.step)
    if shares is not None:
        away = np.abs(plan.delivered_tokens / total - shares)
        seen.deviation += np.divide(away, shares, out=np.zeros(len(shares)), where=shares > 0)
        seen.shared_steps += 1
    fill = total / plan.capacity_tokens
    seen.num_low_fills += fill < LOW_FILL
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


def _extrapolate(part: Part, seen: _Seen, num_steps: int) -> None:
    """Carry the sums on to `num_steps` at the rate of the simulated steps, from one run-out to the next.

    Time is counted in samples, since a step may grow.
    """
    names, batch = seen.planner.streams, part.batch
    places = seen.planner.shares_of_step.places
    borders = _borders(seen, num_steps)
    # What is delivered, not what is drawn: in the first steps the draw also fills the pool.
    now, stop = float(samples_before(batch, seen.steps)), float(samples_before(batch, num_steps))
    sample_tokens = seen.simulated_tokens / max(now, 1)
    most = np.array([float(part.streams[name].max_epochs or math.inf) for name in names])
    an_epoch = np.maximum(seen.epoch_tokens, 1)  # a cell without rows has none, and no share
    most *= an_epoch
    wait = {s: _wait(seen, s) for s in range(len(names)) if s not in seen.first_step and seen.epoch_tokens[s]}
    while now < stop and seen.stop_step is None:
        shares = _shares(seen, _step_at(batch, now))
        if shares is None:
            seen.stop_step = _step_at(batch, now)
            if samples_before(batch, seen.stop_step) < now:
                seen.stop_step += 1
            break
        rate = shares * sample_tokens
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
        seen.drawn += rate * stride
        seen.delivered += rate * stride
        now += stride
        if places.have_epochs:
            epochs = {name: int(seen.drawn[s] / an_epoch[s] + 1e-9) for s, name in enumerate(names)}
            step = _step_at(batch, now) + 1
            if due := places.due(step, seen.begun, epochs):
                seen.begun += tuple((name, step) for name in due)
                borders = _borders(seen, num_steps)
        for s in np.flatnonzero((left <= stride) & (now < stop)).tolist():
            seen.runs_out_step[s] = _step_at(batch, now)
            if part.streams[names[s]].on_exhausted == "error":
                seen.stop_step = _step_at(batch, now)
    shares = _shares(seen, num_steps) if seen.stop_step is None else None
    if shares is not None:
        rate = shares * sample_tokens
        late = {s: _step_at(batch, now + wait[s] / rate[s]) for s in wait if s not in seen.first_step and rate[s] > 0}
        seen.first_step |= late


def _shares(seen: _Seen, step: int) -> NDArray[np.float64] | None:
    """[S] shares in a step, without what has run out; None where nothing is left."""
    gone = frozenset(seen.planner.streams[s] for s in seen.runs_out_step)
    shares = seen.planner.shares_of_step.at(step, gone, begun=seen.begun)
    return None if shares is None else shares / SHARE_ONE


def _borders(seen: _Seen, num_steps: int) -> list[int]:
    """Samples at which the shares change, as far as it is known."""
    steps = seen.planner.shares_of_step.borders(num_steps, seen.begun)
    return [samples_before(seen.planner.part.batch, step) for step in steps]


def _step_at(batch: Batch, samples: float) -> int:
    """The step that a sample belongs to, by the samples before it."""
    stage = [stage for stage in stages_of(batch) if samples_before(batch, stage.from_step) <= samples][-1]
    return stage.from_step + math.floor((samples - samples_before(batch, stage.from_step)) / stage.samples)


def _wait(seen: _Seen, s: int) -> float:
    """Tokens that a source is charged before it gives its next document: half of the document, less the debt."""
    position, order = seen.cursor.position, seen.planner.orders[s]
    ends = order.window(int(position.epoch[s]), int(position.window[s])).ends
    ahead = ends[int(position.offset[s]) :] - ends[int(position.offset[s])]
    next_tokens = int(ahead[np.argmax(ahead > 0)])
    return max(next_tokens / 2 - float(position.debt[s]) - float(position.residue[s]) / 2**32, 0.0)
