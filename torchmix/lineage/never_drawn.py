"""Why a part never draws a document, whatever the number of steps.

In: a part with its open catalog, and rows of sources. Out: the reason of each that no step can have. Must hold: a
reason is said only where it holds for every step of the recipe as it is; an earlier recipe of the run may have drawn
the row. Cost: a search in the kept rows of each stream, for each source.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import most_length
from torchmix.recipe.source.documents import rows_of
from torchmix.recipe.streams import row_sets_of


def never_drawn(part: Part, catalog: Catalog, rows: Mapping[str, Int64Array]) -> dict[str, list[tuple[str, int]]]:
    """The rows that no step has, by the reason.

    Args:
        part: What is planned.
        catalog: The part's, with views and deny-lists.
        rows: Rows of sources, ascending.

    Returns:
        Reason, as it stands behind "since", to (source, row) of each, in the order of `rows`.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for name, wanted in rows.items():
        for reason, has in _reasons(part, catalog, name, wanted).items():
            for row in wanted[has].tolist():
                found.setdefault(reason, []).append((name, row))
    return found


def _reasons(part: Part, catalog: Catalog, name: str, rows: Int64Array) -> dict[str, NDArray[np.bool_]]:
    """For each reason which rows of a source it holds for; a row has the first one."""
    if name not in part.sources:
        return {f"{name} is no source of {part.name}": np.ones(len(rows), np.bool_)}
    source = catalog.sources[name]
    start, stop = rows_of(part.sources[name], source.num_documents)
    tokens = np.asarray(source.sizes.tokens[rows])
    length = most_length(part.batch)
    masks = {
        f"{part.name} uses the rows {start} to {stop} of {name}": (rows < start) | (rows >= stop),
        "it has no tokens": tokens == 0,
        "a deny-list names it": np.isin(rows, catalog.denied_rows.get(name, ())),
        f"overflow: drop leaves out what is longer than {length} tokens": (tokens > length)
        & (part.packing.overflow == "drop"),
        "it is in no stream of the mixture: held out, or in no selection, child or cell": ~_in_streams(
            part, catalog, name, rows
        ),
    }
    told = np.zeros(len(rows), np.bool_)
    for reason, mask in masks.items():
        masks[reason] = mask & ~told
        told |= mask
    return masks


def _in_streams(part: Part, catalog: Catalog, name: str, rows: Int64Array) -> NDArray[np.bool_]:
    row_sets, found = row_sets_of(part), np.zeros(len(rows), np.bool_)
    for member in {member for stream in part.streams.values() for member in stream.members}:
        if row_sets[member].source == name:
            found |= np.isin(rows, catalog.views[member].kept) if member in catalog.views else True
    return found
