"""A picture of a microbatch: which pieces of which sources go through which samples to which ranks, as SVG.

In: a plan. Out: one SVG document, without scripts and without references. Must hold: every number in it is the plan's.
Cost: some hundred bytes a piece.
"""

from __future__ import annotations

from itertools import pairwise
from xml.sax.saxutils import escape

import numpy as np

from torchmix.errors import PlanError
from torchmix.planner.graph.states import states_of
from torchmix.planner.plan import StepPlan

COLUMNS = (("source", 20), ("piece", 190), ("sample", 430), ("bin", 590), ("bucket", 770))
ROW, BOX, TOP = 22, 16, 46
WIDTH = 900


def drawing_of(plan: StepPlan, microbatch: int = 0, *, most_pieces: int = 200) -> str:
    """The roads of the pieces of one microbatch, of all ranks.

    Args:
        plan: A step.
        microbatch: Of each rank.
        most_pieces: Pieces drawn; the others are counted in the title.

    Raises:
        PlanError: The step has no such microbatch.
    """
    if not 0 <= microbatch < plan.num_microbatches:
        raise PlanError(f"step {plan.step} has microbatches 0 to {plan.num_microbatches - 1}, not {microbatch}")
    columns = states_of(plan)
    mine = np.flatnonzero(columns["bin"] == microbatch)
    mine = mine[np.lexsort((columns["slot"][mine], columns["sample"][mine], columns["bucket"][mine]))]
    left_out = max(0, len(mine) - most_pieces)
    mine = mine[:most_pieces]
    rows = [{name: column[at] for name, column in columns.items()} for at in mine.tolist()]
    height = TOP + ROW * max(1, len(rows)) + 20
    title = f"step {plan.step}, microbatch {microbatch}: {len(mine) + left_out} pieces"
    title += f", {left_out} of them not drawn" if left_out else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    parts += [f'<text x="{x}" y="36" fill="#666666">{name}</text>' for name, x in COLUMNS]
    place = {name: _places([_label(name, row) for row in rows]) for name, _ in COLUMNS}
    for (name, x), (following, next_x) in pairwise(COLUMNS):
        roads = dict.fromkeys((_label(name, row), _label(following, row)) for row in rows)
        for start, stop in roads:
            y, next_y = place[name][start], place[following][stop]
            parts.append(
                f'<path d="M{x + 130} {y} C{x + 150} {y} {next_x - 20} {next_y} {next_x - 2} {next_y}" fill="none" '
                f'stroke="#b0b8c4"/>'
            )
    for name, x in COLUMNS:
        for label, y in place[name].items():
            text = escape(label if len(label) <= 22 else label[:21] + "\u2026")
            parts.append(
                f'<g><title>{escape(label)}</title><rect x="{x}" y="{y - BOX / 2:g}" width="130" height="{BOX}" rx="4" '
                f'fill="#eef2f8" stroke="#7a8aa0"/><text x="{x + 6}" y="{y + 4:g}">{text}</text></g>'
            )
    return "".join([*parts, "</svg>\n"])


def _label(column: str, row: dict[str, object]) -> str:
    """What stands in a column for a piece."""
    texts = {
        "source": f"{row['source']}",
        "piece": f"row {row['row']}: {row['tokens']} tokens",
        "sample": f"sample {row['sample']}",
        "bin": f"bin {row['bucket']}.{row['bin']}",
        "bucket": f"rank dp {row['bucket']}",
    }
    return texts[column]


def _places(labels: list[str]) -> dict[str, float]:
    """Height of each label: the mean of its rows."""
    rows: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    return {label: TOP + ROW * (sum(found) / len(found) + 0.5) for label, found in rows.items()}
