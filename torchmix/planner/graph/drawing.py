"""The road of every piece of a step, and a picture of a microbatch as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import PlanError
from torchmix.planner.plan import StepPlan

# --- The road of every piece of a step: from its source to the ranks that compute it.
#
# What is shown is the plan. Cost: a few array operations.


def states_of(plan: StepPlan, module: str | None = None) -> dict[str, NDArray[Any]]:
    """The road of each piece: source, when it was drawn, sample, bucket and bin; of a module's item, its consumer too.

    Args:
        plan: A step.
        module: A module of items; None for the backbone.

    Returns:
        Columns of equal length. `source` is text, the others int64: `row`, `epoch`, `start`, `tokens`, `drawn_step`,
        `sample`, `slot`, `bucket` (data-parallel rank), `bin` (microbatch); with a module `item`, `offset`, `size`,
        `cost`, `consumer`, `consumer_bin`. With `packing: {method: whole}` the bucket is the first rank of the
        document's run, counted over dp x cp, and `ranks` is the size of the run.
    """
    pieces, placement = plan.pieces, plan.placement
    items = None if module is None else plan.item_modules[module]
    piece = np.arange(len(pieces)) if items is None else items.items.piece
    sample = plan.sample[piece]
    columns: dict[str, NDArray[Any]] = {
        "source": np.array(plan.sources)[pieces.source[piece]],
        "row": pieces.row[piece],
        "epoch": pieces.epoch[piece],
        "start": pieces.start[piece],
        "tokens": pieces.tokens[piece],
        "drawn_step": pieces.drawn_step[piece],
        "sample": sample,
        "slot": plan.slot[piece],
        "bucket": placement.dp_rank_of_sample[sample],
        "bin": placement.microbatch_of_sample[sample],
    }
    if plan.contexts is not None:
        run = plan.contexts.bin_of_sample[sample]
        columns["bucket"] = plan.contexts.first_rank_of_bin[run]
        columns["ranks"] = plan.contexts.size_of_bin[run]
    if items is not None:
        columns |= {
            "item": items.items.item,
            "offset": items.items.offset,
            "size": items.items.size,
            "cost": items.cost_of_item,
            "consumer": items.consumer_of_item,
            "consumer_bin": items.bin_of_item,
        }
    return columns


# --- A picture of a microbatch: which pieces of which sources go through which samples to which ranks, as SVG.
#
# Every number in it is the plan's. Cost: some hundred bytes a piece.

COLUMNS = (("source", 20), ("piece", 210), ("sample", 430), ("bin", 620), ("bucket", 810))
COLORS = ("#4269d0", "#c98a00", "#e0452c", "#3a9c86", "#3ca951", "#d9538f", "#a463f2", "#5b8fd9", "#9c6b4e", "#6f7480")
"""Colors of sources. They begin again behind the last one."""
PLAIN = "#8a94a6"
HEADS = {
    "source": "source",
    "piece": "pieces of documents",
    "sample": "sample",
    "bin": "bin: a rank's microbatch",
    "bucket": "bucket: a rank",
}
ROW, BOX, TOP = 22, 16, 46
WIDTH, BOX_WIDTH = 990, 160


def drawing_of(
    plan: StepPlan, microbatch: int, *, most_pieces: int = 200, colors: Mapping[str, str] | None = None
) -> str:
    """The roads of the pieces of one microbatch, of all ranks.

    Args:
        plan: A step.
        microbatch: The microbatch of each rank.
        most_pieces: Pieces drawn one by one. Where there are more, those of one source in one sample are drawn as one,
            and at most so many of these; the title counts all.
        colors: By source, where other pictures beside this one show them; None, and sources that it lacks: its own.

    Raises:
        PlanError: The step has no such microbatch.
    """
    if not 0 <= microbatch < plan.num_microbatches:
        raise PlanError(f"step {plan.step} has microbatches 0 to {plan.num_microbatches - 1}, not {microbatch}")
    columns = states_of(plan)
    mine = np.flatnonzero(columns["bin"] == microbatch)
    mine = mine[np.lexsort((columns["slot"][mine], columns["sample"][mine], columns["bucket"][mine]))]
    title = f"step {plan.step}, microbatch {microbatch}: {len(mine):,} pieces"
    rows = [{name: column[at] for name, column in columns.items()} for at in mine[: most_pieces + 1].tolist()]
    if len(mine) > most_pieces:
        grouped = _by_source_and_sample({name: column[mine] for name, column in columns.items()})
        rows = grouped[:most_pieces]
        if len(grouped) > most_pieces and grouped[most_pieces]["bucket"] == rows[-1]["bucket"] != rows[0]["bucket"]:
            rows = [row for row in rows if row["bucket"] != rows[-1]["bucket"]]  # whole ranks
        ranks, all_ranks = (len({row["bucket"] for row in each}) for each in (rows, grouped))
        title += f", by source and sample; drawn are those of {ranks} of {all_ranks} ranks"
    height = TOP + ROW * max(1, len(rows)) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="16" font-weight="bold">{escape(title, quote=False)}</text>',
    ]
    parts += [f'<text x="{x}" y="36" fill="#666666">{HEADS[name]}</text>' for name, x in COLUMNS]
    place = {name: _places([_label(name, row) for row in rows]) for name, _ in COLUMNS}
    texts = {_label("piece", row): _text(row) for row in rows}
    names = sorted({str(row["source"]) for row in rows})
    color_of = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)} | dict(colors or {})
    color_of |= {_label("piece", row): color_of[str(row["source"])] for row in rows}
    for (name, x), (following, next_x) in pairwise(COLUMNS):
        roads = dict.fromkeys((_label(name, row), _label(following, row)) for row in rows)
        for start, stop in roads:
            y, next_y = place[name][start], place[following][stop]
            parts.append(
                f'<path d="M{x + BOX_WIDTH} {y:g} C{x + BOX_WIDTH + 20} {y:g} {next_x - 20} {next_y:g} {next_x - 2} '
                f'{next_y:g}" fill="none" stroke="{color_of.get(start, PLAIN)}"/>'
            )
    for name, x in COLUMNS:
        for label, y in place[name].items():
            text = texts.get(label, label)
            text = escape(text if len(text) <= 28 else text[:27] + "\u2026", quote=False)
            parts.append(
                f'<g><title>{escape(label, quote=False)}</title><rect x="{x}" y="{y - BOX / 2:g}" width="{BOX_WIDTH}" '
                f'height="{BOX}" rx="4" fill="#f4f6fa" stroke="{color_of.get(label, PLAIN)}"/>'
                f'<text x="{x + 6}" y="{y + 4:g}">{text}</text></g>'
            )
    return "".join([*parts, "</svg>\n"])


def _by_source_and_sample(columns: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """A row for the pieces of each source in each sample, by rank, sample and source."""
    keys = np.stack([columns["bucket"], columns["sample"]])
    names, source = np.unique(columns["source"], return_inverse=True)
    order = np.lexsort((source.reshape(-1), keys[1], keys[0]))
    place = np.stack([keys[0][order], keys[1][order], source.reshape(-1)[order]])
    starts = np.flatnonzero(np.append(True, (place[:, 1:] != place[:, :-1]).any(axis=0)))
    tokens = np.add.reduceat(columns["tokens"][order], starts)
    counts = np.diff(np.append(starts, len(order)))
    return [
        {
            "source": names[place[2, start]],
            "sample": place[1, start],
            "bucket": place[0, start],
            "bin": columns["bin"][0],
            "tokens": of,
            "pieces": count,
        }
        for start, of, count in zip(starts.tolist(), tokens.tolist(), counts.tolist(), strict=True)
    ]


def _label(column: str, row: Mapping[str, Any]) -> str:
    """What stands in a column for a piece."""
    if "pieces" in row:
        piece = f"{row['pieces']:,} of {row['source']} in sample {row['sample']}: {row['tokens']:,} tokens"
    else:
        piece = f"{row['source']}, row {row['row']} from token {row['start']} on: {row['tokens']:,} tokens"
    texts = {
        "source": f"{row['source']}",
        "piece": piece,
        "sample": f"sample {row['sample']}",
        "bin": f"bin {row['bucket']}.{row['bin']}",
        "bucket": f"rank dp {row['bucket']}",
    }
    return texts[column]


def _text(row: Mapping[str, Any]) -> str:
    """What stands in the box of a piece, or of several."""
    if "pieces" in row:
        return f"{row['pieces']:,} pieces, {row['tokens']:,} tokens"
    return f"row {row['row']}: {row['tokens']:,} tokens"


def _places(labels: list[str]) -> dict[str, float]:
    """Height of each label: the mean of its rows, or below the label before it where they would overlap."""
    rows: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    means = {label: sum(found) / len(found) for label, found in rows.items()}
    place: dict[str, float] = {}
    room = 0.0
    for below, label in enumerate(sorted(means, key=lambda label: means[label])):
        last = len(labels) - (len(means) - below)  # leaves a row for each label that follows
        room = max(room, min(means[label], last))
        place[label] = TOP + ROW * (room + 0.5)
        room += 1
    return place
