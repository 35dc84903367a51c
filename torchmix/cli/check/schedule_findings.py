"""Where the changes of the shares begin that wait for an epoch of a stream.

In: a part and a forecast of N steps. Out: a note for each such change. Must hold: an estimated step is said to be one.
Cost: none; the forecast has paid.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmix.cli.check.findings import Finding, Level
from torchmix.cli.terminal import count_text
from torchmix.planner.forecast.figures import Forecast
from torchmix.recipe.parts import Part
from torchmix.recipe.structs import EpochPlace


def schedule_findings(part: Part, result: Forecast) -> Iterator[Finding]:
    """A note for each change of the schedule that begins at an epoch."""
    places = [(number, change.start) for number, change in enumerate(part.schedule)]
    at_epochs = [(number, place) for number, place in places if isinstance(place, EpochPlace)]
    epochs = {source.name: source.epochs for source in result.sources}
    for number, place in at_epochs:
        stage = result.stages[number]
        if stage is None:
            message = (
                f"does not begin in {count_text(result.num_steps)} steps: {place.of} gives {epochs[place.of]:,.4g} "
                f"epochs, not {place.epochs}, or a later change begins before"
            )
        else:
            step = stage.start
            about = "" if result.is_exact(step) else "about "
            verb = "began" if step < result.start else "begins"
            message = f"{verb} in {about}step {count_text(step)}, after epoch {place.epochs} of {place.of}"
        yield Finding(level=Level.NOTE, where=f"schedule[{number}]", message=message)
