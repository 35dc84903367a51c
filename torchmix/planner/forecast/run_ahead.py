"""What each source will give in N steps: the plan, run ahead without data.

In: a checked recipe with its planner, where a run stands, and N. Out: for each source its first step, tokens, epochs,
the step at which it runs out, and how often one document comes in a step. Must hold: up to `simulated_steps` every
number is that of the real plan, since the same planner makes it; beyond, numbers are expected ones, at the rate of the
steps planned. Cost: `simulated_steps` times the planning time of a step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial

from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.planner.cursor import Cursor
from torchmix.planner.forecast.figures import SIMULATED_STEPS, Forecast, SourceForecast, StageForecast
from torchmix.planner.forecast.rates import extrapolate
from torchmix.planner.forecast.simulation import simulate
from torchmix.planner.planner import Planner
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.structs import Batch

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
        planner: Of `patient(part)`, which stops for no stream that runs out.
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
