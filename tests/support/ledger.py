"""A ledger of what planners gave: every span of every row of every stream and epoch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from tests.support.random_mixtures import Rows
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import Planner

Given = dict[tuple[str, int], dict[tuple[str, int], list[tuple[int, int, int]]]]
"""Spans of tokens, each with the step that drew it, by (stream, epoch) and (source, row)."""


def note(pieces: Pieces, planner: Planner, into: Given) -> None:
    """Put pieces into a ledger."""
    names = ("stream", "source", "epoch", "row", "start", "tokens", "drawn_step")
    columns = (getattr(pieces, name).tolist() for name in names)
    for stream, source, epoch, row, start, tokens, step in zip(*columns, strict=True):
        spans = into[planner.streams[stream], epoch].setdefault((planner.sources[source], row), [])
        spans.append((start, start + tokens, step))


def check_ledger(
    given: Given,
    epochs: dict[str, int],
    rows: dict[str, Rows],
    counted: Callable[[str, int, int], int],
) -> int:
    """No row comes twice, no other row comes, and whole epochs lose none; returns the number of whole epochs.

    `counted` says how many tokens a row of a source counts for in a step.
    """
    whole = 0
    for (stream, epoch), documents in given.items():
        for (source, row), spans in documents.items():
            assert row in rows[stream].get(source, set()), f"{stream} has no row {row} of {source}"
            ordered = sorted(spans)
            assert all(a[1] <= b[0] for a, b in pairwise(ordered)), f"{stream} {source} {row} twice"
            assert ordered[0][0] >= 0 and ordered[-1][1] <= counted(source, row, ordered[-1][2])
        if epoch < epochs[stream]:
            whole += 1
            for source, held in rows[stream].items():
                for row in held:
                    spans = documents.get((source, row), [])
                    tokens, first = sum(stop - start for start, stop, _ in spans), spans[0][2] if spans else 0
                    assert tokens == counted(source, row, first), f"{stream} lost tokens of row {row} of {source}"
    return whole
