"""What a trainer shows of its steps to `torchmix top`, and how long it has waited for them.

In: each step as it is handed out. Out: figures on the board of the process, under the name of the part. Must hold: a
loader that is closed shows nothing any more; two loaders of a process have a name each. Cost: a write twice a second.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchmix.boards.board import own_board
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.recipe.parts import Part
from torchmix.steps.header import StepHeader


def run_name(recipe: object, folder: Path) -> str:
    """Equal on all ranks of a job: the recipe, and what the launcher calls the job."""
    path = Path(recipe) if isinstance(recipe, str | Path) else folder
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if job in ("", "none") and "MASTER_PORT" in os.environ:
        job = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}"
    return f"{path.absolute()} {job or f'process {os.getpid()}'}"


class ShownSteps:
    """What one loader shows."""

    def __init__(self, part: Part, tree: ClientPlaceTree, *, run: str) -> None:
        """Show that the process trains; `run`: of `run_name`, empty for a loader that shows nothing."""
        self._rank = tree.topology.rank
        self._name = part.name if int(os.environ.get("RANK", self._rank)) == self._rank else f"{part.name} {self._rank}"
        self._total_tokens = 0
        self.wait_s = self.total_wait_s = 0.0
        if run:
            facts = {"world_size": tree.topology.world_size, "rank": int(os.environ.get("RANK", self._rank))}
            own_board.open("trainer", run=run, facts=facts)
            own_board.show(self._name, lambda: {"step": -1}, is_now=True)
        self._is_shown = bool(run)

    def waited(self, seconds: float) -> None:
        """The trainer has waited for a step, or for the end."""
        self.wait_s = seconds
        self.total_wait_s += seconds

    def step(self, header: StepHeader, *, workers_lost: int) -> None:
        """A step is handed out."""
        self._total_tokens += header.report.delivered_tokens
        if self._is_shown:
            own_board.show(
                self._name,
                lambda: {
                    "step": header.step,
                    "total_tokens": self._total_tokens,
                    "total_data_wait_s": self.total_wait_s,
                    "workers_lost": workers_lost,
                    "plan_s": header.report.plan_s,
                    "read_s": header.report.read_s,
                    "build_s": header.report.build_s,
                    **header.report.reading,
                },
            )

    def close(self) -> None:
        """Show nothing any more."""
        if self._is_shown:
            own_board.withdraw(self._name)
            self._is_shown = False
