"""Which rows of a source are used, and how a split cuts them.

In: `documents` of a source, or the weights of `split`. Out: the rows, as a half-open range. Must hold: the rows of
adjacent parts touch and never overlap; a split cuts where Megatron's `--split` with the same weights does, to the row,
so both use doubles as it does. Cost: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from torchmix.recipe.shares import parse_fraction, percent_text
from torchmix.recipe.structs import Source

PARTS = ("train", "validation", "test")
"""What a recipe can be used for, in the order of `split`."""


def fractions_of(source: Source) -> tuple[Fraction, Fraction]:
    """Where the used rows begin and end, as exact parts of all rows."""
    if source.documents is None:
        return Fraction(0), Fraction(1)
    start, stop = (parse_fraction(text, "documents") for text in source.documents)
    return start, stop


def rows_of(source: Source, num_rows: int) -> tuple[int, int]:
    """Rows used, as (start, stop).

    Each bound is the double nearest to its fraction, times the rows as a double, rounded half to even.
    `_build_megatron_dataset_splits` of Megatron-LM rounds in the same way (blended_megatron_dataset_builder.py).
    """
    start, stop = (round(float(bound) * float(num_rows)) for bound in fractions_of(source))
    return start, stop


def documents_of_split(split: Sequence[int | float], part: str) -> tuple[str, str] | None:
    """The `documents` of a part of a split; None where its weight is 0.

    The weights are divided by their sum and added up from the left, in doubles, as `parse_and_normalize_split` and
    `convert_split_vector_to_split_matrix` of Megatron-LM do (blended_megatron_dataset_config.py).
    """
    total = 0.0
    for weight in split:  # not `sum`, which rounds differently since Python 3.12
        total += float(weight)
    bounds = [0.0]
    for weight in split:
        bounds.append(bounds[-1] + float(weight) / total)
    place = PARTS.index(part)
    if place >= len(split) or bounds[place + 1] <= bounds[place]:
        return None
    # The shortest decimal that reads back as the same double.
    start, stop = (percent_text(Fraction(repr(bound))) for bound in bounds[place : place + 2])
    return start, stop
