"""The rest of a run, at the rate of its first steps.

In: sums over the first steps. Out: the same, carried on to a later step: expected numbers. Must hold: what runs out,
and changes of the shares, count from where they happen. Cost: one stride from each such place to the next.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.planner.forecast.simulation import Seen, asked_in, shares_in
from torchmix.planner.stream_order import DOCUMENT_CHARGE
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step, samples_before, stages_of, tokens_before
from torchmix.recipe.structs import Batch


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
