"""Charts of a report, as SVG.

In: numbers of `ReportNumbers`. Out: SVG elements that stand in a page as they are, without scripts, with text as text.
Must hold: nothing in them refers to another file; the same numbers give the same bytes. Cost: some 100 milliseconds.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import OptionError

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
        raise OptionError("--report needs the package matplotlib: pip install 'torchmix[report]'") from error


def heat_maps(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], *, rows: str, columns: str, columns_wait: bool
) -> str:
    """Two grids of costs side by side, in one scale.

    Args:
        before, after: [rows][columns] costs.
        rows, columns: What they are.
        columns_wait: Whether each column waits for its costliest cell, which then stands above it; else all cells wait
            for the costliest of all.
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
