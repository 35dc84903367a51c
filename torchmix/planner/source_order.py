"""A source of a part -> its order: which rows are used, and how many tokens of each document count.

In: the part that is planned and the sizes of one source. Out: its `SourceOrder`. Must hold: a source that would give
nothing is refused here, since a draw from it would never end. Cost: usually a check of the first documents; all lengths
are read only when `overflow: error` has to find a document that is too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.sizes import MAX_DOCUMENT_TOKENS, SourceSizes
from torchmix.errors import DocumentTooLong, PlanError
from torchmix.mixture.order import SourceOrder
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.source.documents import rows_of
from torchmix.recipe.structs import Recipe


def check_rows_of_part(recipe: Recipe, part: str, num_rows: Mapping[str, int]) -> None:
    """Refuse a part in which a source has no row. A small source may have none in a small part of a `split`.

    Args:
        recipe: A checked recipe, with all of its parts.
        part: `train`, `validation` or `test`.
        num_rows: Rows of each source of the part.

    Raises:
        PlanError: Names the part, each such source with its rows, and what to do.
        RecipeError: The recipe has no such part.
    """
    faults = []
    for name, source in sorted(part_of(recipe, part).sources.items()):
        start, stop = rows_of(source, num_rows[name])
        if start == stop:
            first, last = source.documents or ("0%", "100%")
            faults.append(f"none of the {num_rows[name]:,} rows of source '{name}' lies in its {first} to {last}")
    if not faults:
        return
    remedy = "widen `documents` of these sources, or leave them out of this part"
    if recipe.split is not None:
        remedy = (
            f"give {part} a larger weight in `split`; or replace `split` with `documents` for the sources of each "
            f"part, and leave these sources out of {part}"
        )
    raise PlanError(f"{part}: {'; '.join(faults)}. To mend it, {remedy}")


def order_of_source(part: Part, name: str, sizes: SourceSizes) -> SourceOrder:
    """The order of a source. The recipe's used rows and overflow rule apply before any draw.

    Args:
        part: What is planned.
        name: The source.
        sizes: Its sizes.

    Raises:
        DocumentTooLong: `overflow: error`, and a used document exceeds a sample.
        PlanError: The source would give no tokens at all.
    """
    length, overflow = part.batch.length, part.packing.overflow
    start, stop = rows_of(part.sources[name], sizes.num_documents)
    used = sizes.tokens[start:stop]
    has_long = sizes.longest_tokens > length  # the catalog's maximum over all rows: no lengths are read
    if overflow == "error" and has_long and int(used.max(initial=0)) > length:
        row = start + int(np.argmax(used))
        raise DocumentTooLong(
            f"source '{name}': the document at row {row} has {int(sizes.tokens[row])} tokens, a sample holds {length}, "
            f"and the recipe says `overflow: error`; use split, truncate or drop, or a longer batch.length"
        )
    drops = overflow == "drop" and has_long
    if not _has_tokens(used, at_most=length if drops else MAX_DOCUMENT_TOKENS):
        which = "" if len(used) == sizes.num_documents else f" of its rows {start} to {stop}"
        why = f"`overflow: drop` drops all{which} beyond {length} tokens"
        if not _has_tokens(used, at_most=MAX_DOCUMENT_TOKENS):
            why = f"all documents{which} are empty"
            if start == stop and sizes.num_documents:
                why = f"none of its {sizes.num_documents:,} rows lies in the part that is used (rows {start} to {stop})"
        raise PlanError(
            f"source '{name}' would give no tokens: {why}; remove it from the recipe, or change `overflow` or the rows "
            f"that are used"
        )
    if not has_long or overflow not in ("truncate", "drop"):
        counted = None
    else:
        counted = partial(_truncated if overflow == "truncate" else _without_long, length)
    return SourceOrder(
        name,
        sizes,
        seed=part.seed,
        method=part.shuffle.method,
        counted=counted,
        rows=(start, stop),
        piece_tokens=length,
    )


def _has_tokens(tokens: NDArray[np.int32], *, at_most: int) -> bool:
    """Whether some document has 1 to `at_most` tokens; reads a block at a time, and usually only the first."""
    parts = (tokens[start : start + (1 << 20)] for start in range(0, len(tokens), 1 << 20))
    return any(bool(np.any((part > 0) & (part <= at_most))) for part in parts)


def _truncated(length: int, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.minimum(tokens, length)


def _without_long(length: int, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.where(tokens <= length, tokens, 0)
