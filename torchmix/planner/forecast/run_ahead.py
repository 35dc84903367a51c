"""What each source will give in N steps: the plan, run ahead without data.

In: a checked recipe, the sizes of its sources, and N. Out: for each source its first step, tokens, epochs, the step at
which it runs out, and how often one document comes in a step. Must hold: up to `simulated_steps` every number is that
of the real plan, since the same planner makes it; beyond, numbers are expected ones, at the rate of the steps planned.
Cost: `simulated_steps` times the planning time of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.store import View
from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.planner.forecast.figures import SIMULATED_STEPS, Forecast, SourceForecast
from torchmix.planner.forecast.rates import extrapolate
from torchmix.planner.forecast.simulation import patient_planner, simulate
from torchmix.planner.planner import NONE_DENIED
from torchmix.planner.stream_order import NO_VIEWS
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import tokens_before


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
    seen = simulate(patient_planner(part, sizes, views, denied), part, min(num_steps, simulated_steps), progress)
    stop_is_exact = seen.stop_step is not None
    extrapolate(part, seen, num_steps)
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
    return Forecast(
        num_steps=num_steps,
        simulated_steps=seen.steps,
        stop_step=seen.stop_step,
        stop_is_exact=stop_is_exact,
        capacity_tokens=tokens_before(part.batch, num_steps) // num_steps,
        fill=seen.simulated_tokens / tokens_before(part.batch, seen.steps) if seen.steps else 0.0,
        lowest_fill=seen.lowest_fill,
        lowest_fill_step=seen.lowest_fill_step,
        num_low_fills=seen.num_low_fills,
        alignment=1.0 if part.counts_documents else seen.cursor.drawn.raw / seen.cursor.drawn.aligned,
        sources=sources,
        begun=seen.planner.shares_of_step.places.first_steps(seen.begun),
    )
