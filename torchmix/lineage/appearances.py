"""The steps in which documents are, and the documents of a step.

In: the fold of a run, and rows of sources. Out: tables with a row for each piece: step, place in the step, document and
span. Must hold: a piece is in the table exactly if the step has it, with the span that the model gets. Cost: planning
of every step from the fold's place on; no data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.lineage.documents import DocumentNames
from torchmix.planner.pack import Packed
from torchmix.planner.planner import Planner
from torchmix.steps.history.run_fold import RunFold

PIECES = pa.schema(
    [
        ("step", pa.int64()),
        ("sample", pa.int64()),
        ("slot", pa.int64()),
        ("stream", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("epoch", pa.int64()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
    ]
)
"""A piece: sample and slot as in the plan; the span [start, stop) of tokens of the document."""
DOCUMENTS = PIECES.append(pa.field("id", pa.string()))


def appearances(
    fold: RunFold, wanted: Mapping[str, Int64Array], stop: int, *, on_step: Callable[[], object] = lambda: None
) -> pa.Table:
    """Every piece of some documents, in the steps from the fold's place to `stop`.

    Args:
        fold: Of the run; stands at `stop` afterwards.
        wanted: Rows of each source, ascending.
        stop: The step to end before.
        on_step: Called after each step.

    Returns:
        A table of `PIECES`, by step, sample and slot.

    Raises:
        PlanError: The data ends before `stop`.
    """
    tables = [PIECES.empty_table()]
    while fold.cursor.step < stop:
        step, packed = fold.cursor.step, fold.pack()
        found = _places(fold.planner, packed, wanted)
        if len(found):
            tables.append(_table(step, fold.planner, packed, found))
        on_step()
    return pa.concat_tables(tables)


def documents_of_step(fold: RunFold, names: DocumentNames) -> pa.Table:
    """The pieces of the next step, with the ids of their documents.

    Args:
        fold: Of the run, standing at the step.
        names: Of its sources.

    Returns:
        A table of `DOCUMENTS`, by sample and slot; `id` is null where the source has none.
    """
    step, packed = fold.cursor.step, fold.pack()
    table = _table(step, fold.planner, packed, np.arange(len(packed.sample)))
    ids = np.full(len(table), None, object)
    for s, source in enumerate(fold.planner.sources):
        mine = np.flatnonzero(packed.pieces.source == s)
        if len(mine):
            ids[mine] = names.ids(source, packed.pieces.row[mine]).to_pylist()
    return table.append_column(DOCUMENTS.field("id"), pa.array(ids, pa.string()))


def _places(planner: Planner, packed: Packed, wanted: Mapping[str, Int64Array]) -> Int64Array:
    """Which pieces of a step are of wanted rows, ascending."""
    is_wanted = np.zeros(len(packed.sample), np.bool_)
    for s, source in enumerate(planner.sources):
        rows = wanted.get(source)
        if rows is not None and len(rows):
            at = np.minimum(np.searchsorted(rows, packed.pieces.row), len(rows) - 1)
            is_wanted |= (packed.pieces.source == s) & (rows[at] == packed.pieces.row)
    return np.flatnonzero(is_wanted)


def _table(step: int, planner: Planner, packed: Packed, places: Int64Array) -> pa.Table:
    pieces = packed.pieces
    start = pieces.start[places]
    columns = {
        "step": np.full(len(places), step, np.int64),
        "sample": packed.sample[places],
        "slot": packed.slot[places],
        "stream": np.array(planner.streams, object)[pieces.stream[places]],
        "source": np.array(planner.sources, object)[pieces.source[places]],
        "row": pieces.row[places],
        "epoch": pieces.epoch[places],
        "start": start,
        "stop": start + pieces.tokens[places],
    }
    return pa.table(columns, schema=PIECES)
