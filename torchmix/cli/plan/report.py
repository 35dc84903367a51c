"""One page of HTML about a plan: predicted times, heat maps, lengths, mixture, a drawn microbatch."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.cli.plan.simulate import seconds_text
from torchmix.cli.terminal import count_text, percent_text, write_html
from torchmix.errors import OptionError
from torchmix.planner.balance import CostModel, in_hash_order
from torchmix.planner.contexts import RunCosts, loads_in_order
from torchmix.planner.graph.drawing import drawing_of
from torchmix.planner.methods import sums_of_bins
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.planner.simulation import bins_of, meaning_of_order

# --- Charts of a report, as SVG.
#
# Cost: some 100 milliseconds.

WIDTH = 10.0
"""Inches of a chart."""
MOST_STREAMS = 10
"""Streams with a color of their own. The smaller ones are drawn as one."""
MOST_POINTS = 400
"""Points of a line over steps. Neighbouring steps are averaged beyond."""
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
INK, GREY = "#222222", "#777777"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may hold any character
    "svg.hashsalt": "torchmix",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def check_charts() -> None:
    """Say early that charts cannot be drawn.

    Raises:
        OptionError: matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise OptionError("--report needs the package matplotlib: pip install matplotlib") from error


def heat_maps(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    *,
    rows: str,
    columns: str,
    columns_wait: bool,
    runs: Sequence[Sequence[int]] = (),
) -> str:
    """Two grids of costs side by side, in one scale.

    Args:
        before, after: [rows][columns] costs.
        rows, columns: What they are.
        columns_wait: Whether each column waits for its costliest cell, which then stands above it; else all cells wait
            for the costliest of all.
        runs: Column, first row and rows of each run of rows that share their work in `after`: these are outlined.
    """
    grids = [np.array(each, np.float64) for each in (before, after)]
    mean = max(float(grids[0].mean()), 1e-9)
    grids = [grid / mean for grid in grids]
    lowest, highest = min(grid.min() for grid in grids), max(grid.max() for grid in grids)
    if highest - lowest < 1e-9:
        highest = lowest + 1e-3
    from matplotlib.colors import PowerNorm

    # A single large cell would leave all others in one color.
    norm = PowerNorm(1.0 if highest < 4 else 0.4, vmin=lowest, vmax=highest)
    with _figure(3.9) as figure:
        heights = (1, 4) if columns_wait else (0.01, 5)
        spec = figure.add_gridspec(2, 3, height_ratios=heights, width_ratios=(1, 1, 0.03))
        figure.subplots_adjust(left=0.07, right=0.93, top=0.88, bottom=0.14, hspace=0.12)
        for place, (name, grid) in enumerate(zip(("hash order", "this plan"), grids, strict=True)):
            main = figure.add_subplot(spec[1, place])
            shown = main.imshow(grid, aspect="auto", interpolation="nearest", cmap="YlOrRd", norm=norm)
            main.set_xlabel(columns)
            main.set_ylabel(rows if not place else "")
            for axis, count in ((main.xaxis, grid.shape[1]), (main.yaxis, grid.shape[0])):
                axis.set_ticks(_ticks(count))
            if place and runs:
                _outline(main, runs)
            if not columns_wait:
                main.set_title(f"{name}: the slowest takes {grid.max():.3f} x the mean")
                continue
            top, slowest = figure.add_subplot(spec[0, place]), grid.max(axis=0)
            top.bar(np.arange(len(slowest)), slowest, width=0.9, color="#b33c00")
            top.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
            top.set_ylim(0, highest * 1.05)
            top.set_xlim(-0.5, len(slowest) - 0.5)
            top.set_xticks([])
            top.set_ylabel("slowest")
            top.set_title(f"{name}: the slowest sum to {slowest.sum() / len(slowest):.3f} x the mean")
        bar = figure.colorbar(shown, cax=figure.add_subplot(spec[1, 2]))
        bar.set_label("cost, x the mean")
        return _svg(figure)


def _outline(panel: Any, runs: Sequence[Sequence[int]]) -> None:
    """A frame around each run of rows."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    frames = [Rectangle((column - 0.46, first - 0.46), 0.92, rows - 0.08) for column, first, rows in runs]
    panel.add_collection(PatchCollection(frames, facecolor="none", edgecolor="#1a1a1a", linewidth=0.7, gid="runs"))


def lengths(
    documents: Mapping[str, Sequence[int]], from_tokens: Sequence[int], length: int, colors: Mapping[str, str]
) -> str:
    """How long documents are, and where the tokens are: a line a source."""
    counts = {name: np.array(each, np.float64) for name, each in documents.items()}
    used = np.flatnonzero(sum(counts.values(), np.zeros(len(from_tokens))))
    first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
    edges = np.array([*from_tokens, 2 * from_tokens[-1]], np.float64)[first : last + 2]
    middle = np.array(from_tokens, np.float64) * 1.5
    names, counts = _largest(counts)
    with _figure(3.2) as figure:
        panels = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.07, right=0.99, top=0.86, bottom=0.3, wspace=0.18)
        for panel, title, factor in (
            (panels[0], "part of a source's documents", np.ones(len(middle))),
            (panels[1], "part of a source's tokens (about)", middle),
        ):
            for name in names:
                color = colors.get(name, COLORS[-1])
                values = counts[name] * factor
                panel.stairs(
                    100 * values[first : last + 1] / max(values.sum(), 1e-9),
                    edges,
                    color=color,
                    linewidth=1.8,
                    label=name,
                )
            panel.set_ylim(0, 1.15 * panel.get_ylim()[1])
            panel.axvline(length, color=GREY, linewidth=1, linestyle="--")
            panel.text(length, panel.get_ylim()[1], "a sample ", color=GREY, va="top", ha="right", fontsize=9)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: _count(value))
            panel.set_title(title)
            panel.set_xlabel("tokens of a document")
            panel.yaxis.set_major_formatter("{x:g} %")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=min(5, len(names)))
        return _svg(figure)


def colors_of(streams: Sequence[str], tokens: Sequence[Sequence[int]]) -> dict[str, str]:
    """A color for each of the largest streams; one and the same in all charts."""
    sums = np.array(tokens, np.float64).sum(axis=0)
    names, _ = _largest({name: sums[s : s + 1] for s, name in enumerate(streams)})
    return dict(zip(names, COLORS, strict=False))


def mixture(
    steps: Sequence[int], streams: Sequence[str], tokens: Sequence[Sequence[int]], colors: Mapping[str, str]
) -> str:
    """Part of each stream in the tokens of each step, stacked."""
    table = _averaged(np.array(tokens, np.float64))
    at = _averaged(np.array(steps, np.float64)[:, None])[:, 0]
    shares = 100 * table / np.maximum(table.sum(axis=1, keepdims=True), 1e-9)
    names, by_name = _largest({name: shares[:, s] for s, name in enumerate(streams)})
    if len(at) == 1:
        at, by_name = np.array([at[0], at[0] + 1]), {name: np.repeat(each, 2) for name, each in by_name.items()}
    with _figure(3.0) as figure:
        panel = figure.subplots()
        figure.subplots_adjust(left=0.07, right=0.82, top=0.9, bottom=0.17)
        panel.stackplot(
            at,
            [by_name[name] for name in names],
            labels=names,
            colors=[colors.get(name, COLORS[-1]) for name in names],
            linewidth=0.4,
            edgecolor="w",
        )
        panel.set_xlim(at[0], at[-1])
        panel.set_ylim(0, 100)
        panel.set_xlabel("step")
        panel.set_title("part of the tokens")
        panel.yaxis.set_major_formatter("{x:g} %")
        handles, labels = panel.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(0.83, 0.53))
        return _svg(figure)


def ratios(steps: Sequence[int], before: Sequence[float], after: Sequence[float], fill: Sequence[float]) -> str:
    """Balance and fill of each step."""
    at = _averaged(np.array(steps, np.float64)[:, None])[:, 0]
    with _figure(2.6) as figure:
        left, right = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.07, right=0.99, top=0.86, bottom=0.2, wspace=0.18)
        mark = "o" if len(at) < 30 else ""
        for name, values, color in (("hash order", before, COLORS[2]), ("this plan", after, COLORS[0])):
            left.plot(
                at, _averaged(np.array(values)[:, None])[:, 0], color=color, label=name, marker=mark, markersize=3
            )
        left.set_title("sum of the slowest, x the lower bound")
        left.set_ylim(bottom=min(1.0, *after, *before) - 0.02)
        left.legend(loc="best")
        right.plot(at, 100 * _averaged(np.array(fill)[:, None])[:, 0], color=COLORS[4], marker=mark, markersize=3)
        right.set_title("tokens of a batch that are no padding")
        right.set_ylim(0, 102)
        right.yaxis.set_major_formatter("{x:g} %")
        for panel in (left, right):
            panel.set_xlabel("step")
            panel.xaxis.get_major_locator().set_params(integer=True)
        return _svg(figure)


def times(orders: Mapping[str, Mapping[str, Mapping[str, float | None]]], bubble: float) -> str:
    """Predicted times over the ideal: a group of two bars an order."""
    names = list(orders)
    place = np.arange(len(names))
    with _figure(2.8) as figure:
        panel = figure.subplots()
        figure.subplots_adjust(left=0.13, right=0.98, top=0.86, bottom=0.26)
        for number, (kind, label) in enumerate(
            (("at_end", "ranks meet at the end of a step"), ("each_microbatch", "ranks meet in each microbatch"))
        ):
            values = [float(orders[name][kind]["over_ideal"] or 0.0) for name in names]
            bars = panel.barh(place + 0.2 - 0.4 * (1 - number), values, 0.36, color=COLORS[number], label=label)
            panel.bar_label(bars, [f"{value:.3f}" for value in values], padding=3, fontsize=9)
        panel.axvline(
            bubble, color=GREY, linewidth=1, linestyle="--", label="equal microbatches: the pipeline's bubble alone"
        )
        panel.set_yticks(place, names)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.1 * panel.get_xlim()[1])
        panel.set_title("predicted time of a step, x the ideal (shorter is better)")
        figure.legend(*panel.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9)
        return _svg(figure)


def _count(value: float) -> str:
    """512, 4K, 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _ticks(count: int) -> list[int]:
    step = max(1, -(-count // 8))
    return list(range(0, count, step))


def _averaged(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n, k] -> [at most MOST_POINTS, k]: means of neighbours."""
    if len(values) <= MOST_POINTS:
        return values
    starts = np.linspace(0, len(values), MOST_POINTS, endpoint=False).astype(np.int64)
    sums: NDArray[np.float64] = np.add.reduceat(values, starts, axis=0)
    return sums / np.diff(np.append(starts, len(values)))[:, None]


def _largest(values: Mapping[str, NDArray[np.float64]]) -> tuple[list[str], dict[str, NDArray[np.float64]]]:
    """The largest by their sums in descending order, and the others as one."""
    names = sorted(values, key=lambda name: (-float(values[name].sum()), name))
    if len(names) <= MOST_STREAMS:
        return names, dict(values)
    kept, others = names[: MOST_STREAMS - 1], names[MOST_STREAMS - 1 :]
    rest = f"{len(others)} others"
    return [*kept, rest], {**{name: values[name] for name in kept}, rest: sum(values[name] for name in others)}  # type: ignore[dict-item]


@contextmanager
def _figure(height: float) -> Iterator[Any]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(WIDTH, height))


def _svg(figure: Any) -> str:
    """The `svg` element of a figure."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(
        r'^<svg[^>]*?viewBox="([^"]*)"[^>]*>',
        r'<svg xmlns="http://www.w3.org/2000/svg" '
        r'xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1" role="img">',
        text,
        count=1,
    )


# --- What a report shows, as numbers.
#
# Each number is the plan's, or a sum of the plan's. Cost: a few array operations a step; one plan is held.

MOST_PIECES = 24
"""Pieces of the microbatch that is drawn."""
LENGTHS = 1 << np.arange(32, dtype=np.int64)
"""Lower bounds of the classes of documents by their tokens; empty documents count in none."""


class ReportNumbers:
    """Sums over the steps added, and the step that balance changes most."""

    def __init__(self, cost: CostModel, length: int, runs: RunCosts | None = None) -> None:
        """`cost`: of the backbone; `length`: tokens of a sample; `runs`: of ranks, where they share documents."""
        self._cost, self._length, self._runs = cost, length, runs
        self._steps: list[int] = []
        self._of_streams: list[dict[str, int]] = []
        self._of_step: list[tuple[float, float, float]] = []
        self._documents: dict[str, NDArray[np.int64]] = {}
        self._shown: StepPlan | None = None

    def add(self, plan: StepPlan) -> None:
        """Count a step."""
        self._steps.append(plan.step)
        self._of_streams.append(dict(zip(plan.streams, plan.delivered_tokens.tolist(), strict=True)))
        self._of_step.append((plan.fill, plan.balance.hash_order_ratio, plan.balance.ratio))
        pieces = plan.pieces
        begun = pieces.start == 0
        for number, name in enumerate(plan.sources):
            tokens = pieces.document_tokens[begun & (pieces.source == number)]
            counts = np.bincount(np.searchsorted(LENGTHS, tokens, side="right"), minlength=len(LENGTHS) + 1)[1:]
            self._documents[name] = self._documents.get(name, np.zeros(len(LENGTHS), np.int64)) + counts
        if self._shown is None or _gain(plan) > _gain(self._shown):
            self._shown = plan

    def values(self) -> dict[str, Any]:
        """The numbers of the page; there is at least one step."""
        plan = self._shown
        assert plan is not None, "there is a step"
        before_plan, planned = self._bins(plan)
        streams = sorted(set().union(*self._of_streams))  # an edit may bring some and take some
        fill, before, after = zip(*self._of_step, strict=True)
        return {
            "length": self._length,
            "steps": self._steps,
            "streams": streams,
            "delivered_tokens": [[step.get(name, 0) for name in streams] for step in self._of_streams],
            "fill": list(fill),
            "hash_order_ratio": list(before),
            "balance_ratio": list(after),
            "documents_by_length": {
                "from_tokens": LENGTHS.tolist(),
                "documents": {name: counts.tolist() for name, counts in self._documents.items()},
            },
            "shown_step": {
                "step": plan.step,
                "order_digest": plan.order_digest.hex(),
                "plan_digest": plan.plan_digest.hex(),
                "lower_bound": plan.balance.lower_bound,
                "ranks_are": "rank of dp x cp" if plan.contexts else "data-parallel rank",
                "hash_order": before_plan.tolist(),
                "plan": planned.tolist(),
                "runs": _runs_of(plan),
                "modules": {name: _of_module(plan, module) for name, module in plan.item_modules.items()},
            },
        }

    def _bins(self, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[ranks, microbatches] cost in hash order and in the plan."""
        if plan.contexts is not None and self._runs is not None:
            before = loads_in_order(plan.pieces.tokens, self._runs)
            return before.T, plan.contexts.load_of_ranks(self._runs.num_ranks).T
        cost = self._cost.of_samples(plan.pieces.tokens, plan.sample, num_samples=plan.num_samples, length=plan.length)
        plain = in_hash_order(plan.num_samples, plan.layout)
        return bins_of(cost, plain, plan.layout), bins_of(cost, plan.placement, plan.layout)

    def drawing(self, colors: Mapping[str, str]) -> str:
        """The roads of the first pieces of a microbatch of the step that is shown, as SVG."""
        assert self._shown is not None, "there is a step"
        return drawing_of(self._shown, 0, most_pieces=MOST_PIECES, colors=colors)


def _runs_of(plan: StepPlan) -> list[list[int]]:
    """Microbatch, first rank and ranks of each run that shares documents; none without runs."""
    runs = plan.contexts
    if runs is None:
        return []
    table = np.stack([runs.microbatch_of_bin, runs.first_rank_of_bin, runs.size_of_bin], axis=1)
    found: list[list[int]] = table[(runs.size_of_bin > 1) & (runs.tokens_of_bin > 0)].tolist()
    return found


def _gain(plan: StepPlan) -> float:
    return plan.balance.hash_order_cost / max(plan.balance.cost, 1)


def _of_module(plan: StepPlan, module: ItemPlan) -> Mapping[str, Any]:
    """Cost of the bins of each consumer, in rows by replica: consumers of a replica side by side, bin by bin."""

    def grid(consumer: NDArray[np.int64]) -> list[list[int]]:
        place = consumer * module.num_bins + module.bin_of_item
        sums = sums_of_bins(module.cost_of_item, place, module.num_consumers * module.num_bins)
        found: list[list[int]] = sums.reshape(plan.layout.dp, -1).tolist()
        return found

    return {
        "unit": module.unit,
        "axis": module.axis,
        "num_items": len(module.items),
        "num_bins": module.num_bins,
        "hash_order": grid(np.arange(len(module.items)) % module.num_consumers),
        "plan": grid(module.consumer_of_item),
    }


# --- One page of HTML about a plan: predicted times, heat maps, lengths, mixture, a drawn microbatch.
#
# Each number of a picture stands in the file as JSON, in `<script type="application/json" id="values">`; text of the
# recipe's is escaped.

MEETINGS = {"at_end": "at the end of a step", "each_microbatch": "in each microbatch"}
COMPARED = ("arrival order", "hash order")
"""Orders that the plan's gain is said over."""
PAGE_STYLE = """\
h2 { margin: 2em 0 .3em } p { margin: .4em 0; max-width: 56em } p.facts { color: #555 } figure { margin: .6em 0 1.4em }
figure > svg { width: 100%; height: auto } figure.drawn { overflow-x: auto } figure.drawn > svg { width: auto }
figcaption { max-width: 60em } li { margin: .2em 0 }
table { border-collapse: collapse; margin: .6em 0 } td, th { padding: .25em .8em; text-align: right }
td:first-child, th:first-child { text-align: left } thead { border-bottom: 1px solid #999 }
tr.ours { font-weight: 600; background: #eef2fb } .gain { font-size: 1.15em }
"""


def write_report(path: Path, values: Mapping[str, Any], numbers: ReportNumbers) -> None:
    """Write the page.

    Args:
        path: The file to write.
        values: The values of the plan, as `--json` prints them.
        numbers: The numbers of the same steps.

    Raises:
        OSError: The file cannot be written.
    """
    shown = numbers.values()
    drawing = numbers.drawing(_colors(shown))
    write_html(path, f"Plan of {Path(values['recipe']).name}", _parts(values, shown, drawing), style=PAGE_STYLE)


def _parts(values: Mapping[str, Any], shown: Mapping[str, Any], drawing: str) -> Iterator[str]:
    last = values["first_step"] + values["num_steps"] - 1
    ranks = values["dp"] * values["tp"] * values["cp"] * values["pp"]
    yield (
        f'<p class="facts">steps {count_text(values["first_step"])} to {count_text(last)} of {values["part"]} &middot; '
        f"{count_text(ranks)} ranks: dp {values['dp']}, cp {values['cp']}, pp {values['pp']}, tp {values['tp']}, "
        f"micro-batch size {values['micro_batch_size']} &middot; {count_text(values['capacity_tokens'])} tokens a "
        f"step, {percent_text(values['fill'])} filled &middot; recipe {values['recipe_fingerprint']}, catalog "
        f"{values['catalog_fingerprint']}, order digest {values['order_digest']}</p>\n"
    )
    if "simulation" in values:
        yield from _simulation(values["simulation"])
    yield from _balance(values, shown)
    yield from _data(values, shown)
    yield "<h2>How pieces come to ranks</h2>\n"
    yield _picture(
        drawing,
        f"Microbatch 0 of step {shown['shown_step']['step']}: pieces of documents come from their source into a "
        f"sample, the sample into a microbatch of a rank.",
        kind="drawn",
    )
    if "simulation" in values:
        yield "<h2>What is assumed</h2>\n<ul>\n"
        yield from (f"<li>{html.escape(line)}</li>\n" for line in values["simulation"]["assumptions"])
        yield "</ul>\n"
    content = json.dumps({"plan": values, "shown": shown}).replace("<", "\\u003c")
    yield f'<script type="application/json" id="values">{content}</script>\n'


def _simulation(found: Mapping[str, Any]) -> Iterator[str]:
    orders = found["orders"]
    yield f"<h2>Predicted time of a step: {html.escape(found['model'])} on {count_text(found['world'])} ranks</h2>\n"
    for kind, where in MEETINGS.items():
        times_of = {name: one[kind]["over_ideal"] for name, one in orders.items()}
        compared = [name for name in COMPARED if name in times_of]
        gains = (f"{times_of[name] / times_of['this plan']:.2f} x as fast as {name}" for name in compared)
        yield f'<p class="gain">Where ranks meet {where}, this plan is {" and ".join(gains)}.</p>\n'
    yield _picture(
        times(orders, found["pipeline_bubble"]),
        "The ideal is equal work for all ranks, in a pipeline without a bubble. Communication costs nothing here; all "
        "assumptions stand at the end of the page.",
    )
    yield "<table><thead><tr><th>order</th><th>meet at the end</th><th>x ideal</th><th>in each microbatch</th>"
    yield "<th>x ideal</th></tr></thead><tbody>\n"
    for name, ways in orders.items():
        predicted = [ways[kind] for kind in MEETINGS]
        cells = "".join(f"<td>{seconds_text(one['seconds'])}</td><td>{one['over_ideal']:.3f}</td>" for one in predicted)
        yield f"<tr{' class=ours' if name == 'this plan' else ''}><td>{name}</td>{cells}</tr>\n"
    yield "</tbody></table>\n<ul>\n"
    meanings = {name: meaning_of_order(name, has_runs=found["has_runs"]) for name in orders}
    yield from (f"<li><b>{name}</b>: {meaning}.</li>\n" for name, meaning in meanings.items())
    yield "</ul>\n"


def _balance(values: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[str]:
    step = shown["shown_step"]
    frames = "Frames are runs of ranks that share documents. " if step["runs"] else ""
    yield f"<h2>Work of each rank in each microbatch, step {step['step']}</h2>\n"
    yield (
        "<p>A microbatch takes as long as that of its slowest rank, so what counts is the darkest cell of each column, "
        "which the bars repeat. Both pictures have the same samples and one scale. Samples of like cost meet in one "
        "microbatch of the plan; costly ones are in the middle, as suits a pipeline.</p>\n"
    )
    yield _picture(
        heat_maps(
            step["hash_order"],
            step["plan"],
            rows=step["ranks_are"],
            columns="microbatch",
            columns_wait=True,
            runs=step["runs"],
        ),
        f"Backbone. {frames}Balance changes this step most among those planned. Over all of them the plan is at "
        f"{values['balance_ratio']:.4f} x the lower bound, hash order at {values['hash_order_ratio']:.4f}.",
    )
    for name, module in step["modules"].items():
        consumers = "consumer in the replica" + (", bin by bin" if module["num_bins"] > 1 else "")
        facts = values["modules"][name]
        yield _picture(
            heat_maps(
                module["hash_order"], module["plan"], rows="data-parallel rank", columns=consumers, columns_wait=False
            ),
            f"Module {html.escape(name)}: {count_text(module['num_items'])} {module['unit']}s over {module['axis']}. "
            f"Over all steps its slowest consumer is at {facts['balance_ratio']:.4f} x the lower bound, in hash order "
            f"at {facts['hash_order_ratio']:.4f}. A large item cannot be divided, so a bound may be one item.",
        )
    yield _picture(
        ratios(shown["steps"], shown["hash_order_ratio"], shown["balance_ratio"], shown["fill"]),
        "All steps: the balance of the backbone, and how full the samples are.",
    )


def _data(values: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[str]:
    colors = _colors(shown)
    yield "<h2>What the steps hold</h2>\n"
    yield _picture(
        mixture(shown["steps"], shown["streams"], shown["delivered_tokens"], colors),
        "Tokens of each stream in the samples of a step.",
    )
    heads = "".join(f"<th>{name}</th>" for name in ("stream", "share", "given", "tokens", "epochs"))
    yield f"<table><thead><tr>{heads}</tr></thead><tbody>\n"
    for one in values["sources"]:
        yield (
            f"<tr><td>{html.escape(one['name'])}</td><td>{percent_text(one['share'])}</td>"
            f"<td>{percent_text(one['delivered_share'])}</td><td>{count_text(one['delivered_tokens'])}</td>"
            f"<td>{one['epochs']:,.4g}</td></tr>\n"
        )
    yield "</tbody></table>\n"
    lengths_of = shown["documents_by_length"]
    yield _picture(
        lengths(lengths_of["documents"], lengths_of["from_tokens"], shown["length"], colors),
        "Documents that begin in these steps, by length: classes double. Few long documents may hold most of the "
        "tokens, and most of the attention's work.",
    )


def _colors(shown: Mapping[str, Any]) -> dict[str, str]:
    return colors_of(shown["streams"], shown["delivered_tokens"])


def _picture(drawn: str, caption: str, *, kind: str = "chart") -> str:
    return f'<figure class="{kind}">{drawn}<figcaption>{caption}</figcaption></figure>\n'
