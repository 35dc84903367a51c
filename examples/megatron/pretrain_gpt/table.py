"""The results as text: a line for each cell, and below the tables what failed.

In: cells with their findings. Out: tables. Must hold: a check that was not made is no pass. Cost: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LAYOUT_CHECKS = ("plan", "loss", "resume", "resumed loss")
"""Columns of a layout, in order; see `run_matrix.py`."""
FEATURE_CHECKS = ("works",)
"""Columns of a feature; see `features.py`."""
NOT_MADE = "-"


@dataclass(kw_only=True, slots=True)
class Cell:
    """A packing at a layout, or with a feature."""

    packing: str
    name: str
    problems_of_check: dict[str, list[str]] = field(default_factory=dict)
    """Check -> what is wrong; empty if it passed."""
    wall_s: float | None = None

    def note(self, check: str, problems: list[str]) -> None:
        """Keep the result of a check."""
        assert check in LAYOUT_CHECKS + FEATURE_CHECKS, check
        self.problems_of_check[check] = problems

    @property
    def is_fine(self) -> bool:
        """Whether checks were made, and all of them passed."""
        return bool(self.problems_of_check) and not any(self.problems_of_check.values())

    @property
    def verdict(self) -> str:
        """A line for the one who waits."""
        failed = [check for check, problems in self.problems_of_check.items() if problems]
        return f"{self.packing} {self.name}: " + ("pass" if self.is_fine else f"FAIL ({', '.join(failed)})")

    def result(self, check: str) -> str:
        """`pass`, `FAIL`, or `-` for a check that was not made."""
        problems = self.problems_of_check.get(check)
        return NOT_MADE if problems is None else "FAIL" if problems else "pass"


def table(cells: Sequence[Cell], checks: Sequence[str]) -> str:
    """A line for each cell, a column for each check."""
    rows = [("packing", "name", *checks, "seconds")]
    for cell in cells:
        seconds = NOT_MADE if cell.wall_s is None else f"{cell.wall_s:.0f}"
        rows.append((cell.packing, cell.name, *(cell.result(check) for check in checks), seconds))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def failures(cells: Sequence[Cell]) -> str:
    """What is wrong, under the name of the cell and of the check; empty if nothing is."""
    parts = [
        f"\n{cell.packing} {cell.name}, {check}:\n" + "".join(f"  {line}\n" for line in problems)
        for cell in cells
        for check, problems in cell.problems_of_check.items()
        if problems
    ]
    return "".join(parts)
