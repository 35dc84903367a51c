"""Several steps of one replica as one, and cut again.

In: the pieces of consecutive steps of one size. Out: pieces of one long step, which `build` fills at once; its arrays,
cut into those of the steps. Must hold: each step's arrays are those that it would have alone. Cost: copies of the
columns of pieces; the arrays of steps are views, so the memory of all of them returns together. A call of numpy costs
about a microsecond, `build` makes some hundred, and a step of 32,768 tokens has some 40 pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.constructor.arrays import StepArrays
from torchmix.constructor.build import ReplicaPieces
from torchmix.constructor.row_arrays import cut_rows


def join_pieces(steps: Sequence[ReplicaPieces]) -> ReplicaPieces:
    """The pieces of all steps, whose samples follow each other; of steps with as many samples each."""
    first = steps[0]
    if len(steps) == 1:
        return first

    def of_all(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(step, name) for step in steps])

    samples_before = np.repeat(np.arange(len(steps)) * first.num_samples, [len(step.row) for step in steps])
    return ReplicaPieces(
        step=first.step,
        num_tokens_global=0,
        num_samples=first.num_samples * len(steps),
        micro_batch_size=first.micro_batch_size,
        sample=of_all("sample") + samples_before,
        sample_offset=of_all("sample_offset"),
        source=of_all("source"),
        row=of_all("row"),
        start=of_all("start"),
        tokens=of_all("tokens"),
        ends_document=of_all("ends_document"),
        epoch=None if first.epoch is None else of_all("epoch"),
        source_names=first.source_names,
    )


def cut_steps(joined: StepArrays, steps: Sequence[ReplicaPieces]) -> list[StepArrays]:
    """The arrays of each step.

    Args:
        joined: Built from `join_pieces(steps)`, with no token masked.
        steps: The pieces of each.
    """
    fields = joined.fields
    count = len(fields["max_seqlen"]) // len(steps)
    borders = range(0, count * len(steps) + 1, count)
    cut = {name: _by_microbatch(fields[name], borders) for name in ("tokens", "labels", "max_seqlen")}
    cut["spans_stop"], cut["spans"] = _by_stop(fields["spans_stop"], [fields["spans"]], borders)
    boundaries = [fields["cu_seqlens"], fields["cu_seqlens_padded"]]
    cut["cu_seqlens_stop"], cut["cu_seqlens"], cut["cu_seqlens_padded"] = _by_stop(
        fields["cu_seqlens_stop"], boundaries, borders
    )
    rows = cut_rows(joined.rows, borders)
    return [
        StepArrays(
            step=step.step,
            num_tokens_global=step.num_tokens_global,
            fields={name: cut[name][index] for name in fields},
            rows=rows[index],
        )
        for index, step in enumerate(steps)
    ]


def _by_microbatch(array: NDArray[Any], borders: range) -> list[NDArray[Any]]:
    return [array[start : start + borders.step] for start in borders[:-1]]


def _by_stop(stop: NDArray[np.int64], arrays: Sequence[NDArray[Any]], borders: range) -> list[list[NDArray[Any]]]:
    """The stops of each step, counted from its own first entry, and its part of each array."""
    ends = [0, *stop[borders.step - 1 :: borders.step].tolist()]
    stops = [part - begin for part, begin in zip(_by_microbatch(stop, borders), ends[:-1], strict=True)]
    return [stops, *([array[start:end] for start, end in pairwise(ends)] for array in arrays)]
