"""The figures of `loader.stats()` and of shared loaders, in the forms that monitoring programs read.

The output has every number of the dict, and nothing else. Cost: microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

COUNTED = ("total_", "bytes_", "pages_", "cache_hits", "cache_misses")
"""Prefixes of the figures that only grow during the life of the reading process."""
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def flat_stats(stats: Mapping[str, Any], prefix: str = "torchmix/") -> dict[str, float]:
    """Numbers by name: `torchmix/fill`, and `torchmix/tokens_of_source/web` for each source.

    Args:
        stats: From `loader.stats()`.
        prefix: Start of every name.
    """
    flat: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            flat |= flat_stats(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = value
    return flat


def prometheus_text(stats: Mapping[str, Any], labels: Mapping[str, object] | None = None) -> str:
    """Numbers in Prometheus' text format, version 0.0.4.

    Names begin with `torchmix_`. Names of seconds end with `_seconds`, and names of counters with `_total`. A dict
    becomes one metric with a label: `torchmix_tokens{source="web"}`.

    Args:
        stats: From `loader.stats()`.
        labels: Labels of every number, such as {"rank": 0, "job": "pretrain"}.

    Returns:
        Lines, each with a newline, for a scrape, a push gateway, or the textfile collector of node_exporter.

    Raises:
        ValueError: Prometheus does not accept the name of a label.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    for label in labels or {}:
        if not LABEL.fullmatch(label):
            raise ValueError(f"label {label!r}: Prometheus takes letters, digits and underscores, no digit first")
    return figures_text(stats, prefix="torchmix_", is_counted=lambda name: name.startswith(COUNTED), labels=labels)


def figures_text(
    figures: Mapping[str, Any],
    *,
    prefix: str,
    is_counted: Callable[[str], bool],
    labels: Mapping[str, object] | None = None,
) -> str:
    """As `prometheus_text`.

    Args:
        figures: By name; other values than numbers and dicts of numbers are left out.
        prefix: Begins each metric.
        is_counted: Whether a figure of a name only grows.
        labels: The labels of each number.
    """
    fixed = {name: str(value) for name, value in (labels or {}).items()}
    lines: list[str] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            metric, _, label = name.partition("_of_")
            numbers = {key: number for key, number in value.items() if isinstance(number, int | float)}
            labelled = [({**fixed, label or "name": key}, number) for key, number in numbers.items()]
            lines += _metric(prefix + _name(metric, is_counted(metric)), labelled)
        elif isinstance(value, int | float):
            lines += _metric(prefix + _name(name, is_counted(name)), [(fixed, value)])
    return "".join(f"{line}\n" for line in lines)


def _name(figure: str, is_counted: bool) -> str:
    name = figure.removeprefix("total_")
    if name.endswith("_s"):
        name = name.removesuffix("_s") + "_seconds"
    return f"{name}_total" if is_counted else name


def _metric(name: str, numbers: list[tuple[dict[str, str], float]]) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# TYPE {name} {kind}"] if numbers else []
    for labels, number in numbers:
        inside = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
        lines.append(f"{name}{f'{{{inside}}}' if inside else ''} {number!r}")
    return lines


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
