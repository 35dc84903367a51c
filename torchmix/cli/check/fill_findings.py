"""Batches that hold much padding.

In: a part of a recipe, and a forecast of N steps. Out: a finding, with the cause and what to do. Must hold: what a
recipe wastes in most steps is a finding, what it wastes in some is a note. Cost: none.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmix.cli.check.findings import Finding, Level
from torchmix.cli.terminal import count_text, percent_text
from torchmix.planner.forecast.figures import LOW_FILL, Forecast
from torchmix.recipe.parts import Part


def fill_findings(part: Part, result: Forecast) -> Iterator[Finding]:
    """Batches with much padding: their samples cost as much as full ones."""
    if not result.num_low_fills:
        return
    packing, length = part.packing, count_text(part.batch.length)
    if packing.method == "pad":
        reason = (
            f"each document has a sample of {length} tokens of its own; a shorter batch.length, or method: best_fit, "
            f"wastes less"
        )
    elif 1 - result.alignment > (1 - result.fill) / 2:
        reason = (
            f"documents rounded up to align_tokens {packing.align_tokens} take {1 / result.alignment:.2f} times their "
            f"tokens; a smaller align_tokens, or method: concat, wastes less"
        )
    else:
        reason = (
            f"whole documents leave room at the ends of samples of {length} tokens; a longer batch.length, more "
            f"samples, or method: concat, wastes less"
        )
    is_common = result.fill < LOW_FILL
    count, steps = count_text(result.num_low_fills), count_text(result.simulated_steps)
    message = (
        f"{count} of {steps} batches are filled below {LOW_FILL:.0%}, on average {percent_text(result.fill)}, step "
        f"{count_text(result.lowest_fill_step)} to {percent_text(result.lowest_fill)}: {reason}"
    )
    yield Finding(level=Level.FINDING if is_common else Level.NOTE, where="packing", message=message)
