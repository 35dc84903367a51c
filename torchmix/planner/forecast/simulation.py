"""The first steps of a run, or those after a state, planned in full.

In: a planner, and where the run stands. Out: sums over the steps so far. Must hold: the steps are those of the run,
since the same planner makes them. Cost: the planning of each step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceExhausted
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.mixture.shares.places import Begun
from torchmix.planner.cursor import Cursor, begun_by, gone_by
from torchmix.planner.forecast.figures import LOW_FILL, ModuleSums
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.planner.stream_order import epoch_tokens
from torchmix.recipe.parts import Part


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
