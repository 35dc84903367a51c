"""Which document was in which step, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.array_files import put_whole
from torchmix.catalog.manifest import PropertiesEntry
from torchmix.catalog.properties import PropertyRows
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.errors import OptionError
from torchmix.planner.pack import Packed
from torchmix.planner.planner import Planner
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import most_length
from torchmix.recipe.sources import longest_of, overflow_of, rows_of
from torchmix.recipe.streams import row_sets_of
from torchmix.steps.history import RunFold

# --- Documents as a person names them: a row of a source, or an id.
#
# An id stands for every row that has it, in any source that names its rows. Cost: a look at the kept column of ids of
# each source; no data file is read.

MOST_NAMED = 5
"""Ids or rows that an error names."""


class DocumentNames:
    """The rows of a catalog's sources, by name and by id."""

    def __init__(
        self, sources: Mapping[str, SourceCatalog], folder: Path, properties: Mapping[str, PropertiesEntry]
    ) -> None:
        """Take sources.

        Args:
            sources: By name.
            folder: Where the catalog lies.
            properties: What is kept of the rows of each source.
        """
        self._sources, self._folder, self._properties = dict(sorted(sources.items())), folder, properties

    def row(self, word: str) -> tuple[str, int]:
        """The source and the row of a word as `web:1234`.

        Raises:
            OptionError: It is no such word; there is no such source or row.
        """
        name, colon, number = word.rpartition(":")
        if not colon or not (number.isascii() and number.isdigit()):
            raise OptionError(f"{word!r} is no row of a source; write it as web:1234")
        if name not in self._sources:
            sources = list(self._sources)
            raise OptionError(
                f"{word!r}: there is no source {name!r}{nearest(name, sources)}; sources are {listed(sources)}"
            )
        row, num_rows = int(number), self._sources[name].num_documents
        if row >= num_rows:
            raise OptionError(f"{word!r}: {name!r} has {num_rows} rows, from 0 on")
        return name, row

    def rows_of_ids(self, ids: Collection[str]) -> list[tuple[str, int]]:
        """Source and row of every document with one of these ids, in the order of sources and rows.

        Raises:
            OptionError: An id is of no row, or no source names its rows.
        """
        named = self._sources_with_ids()
        if not named:
            raise OptionError("no source has ids of its rows; give each an `id` column in the recipe, or name rows")
        wanted, missing = pa.array(sorted(set(ids)), pa.string()), set(ids)
        found: list[tuple[str, int]] = []
        for name in named:
            column = self._ids(name)
            rows = np.flatnonzero(pc.is_in(column, value_set=wanted).to_numpy(zero_copy_only=False))
            found += [(name, row) for row in rows.tolist()]
            missing -= set(column.take(pa.array(rows)).to_pylist())
        if missing:
            raise OptionError(
                f"no row has the id {listed(map(repr, sorted(missing)), MOST_NAMED)}; looked at the rows of "
                f"{listed(named)}"
            )
        return found

    def ids(self, source: str, rows: Int64Array) -> pa.Array:
        """The id of each row of a source as text; null where there is none."""
        if source not in self._sources_with_ids():
            return pa.nulls(len(rows), pa.string())
        return self._ids(source).take(pa.array(rows)).combine_chunks()

    def _sources_with_ids(self) -> list[str]:
        kept = self._properties
        return [name for name in self._sources if name in kept and kept[name].id is not None]

    def _ids(self, source: str) -> pa.ChunkedArray:
        entry = self._properties[source]
        assert entry.id is not None, "the caller has asked"
        rows = PropertyRows(self._folder, self._sources[source], entry, {})
        return rows.whole([entry.id])[entry.id].cast(pa.string())


def rows_by_source(rows: Sequence[tuple[str, int]]) -> dict[str, Int64Array]:
    """Rows of each source, ascending, each once."""
    found: dict[str, list[int]] = {}
    for name, row in rows:
        found.setdefault(name, []).append(row)
    return {name: np.unique(np.array(of_source, np.int64)) for name, of_source in sorted(found.items())}


# --- The steps in which documents are, and the documents of a step.
#
# A piece is in the table exactly if the step has it, with the span that the model gets. Cost: planning of every step
# from the fold's place on; no data is read.

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
    fold: RunFold, wanted: Mapping[str, Int64Array], stop: int, *, on_step: Callable[[], object]
) -> pa.Table:
    """Every piece of some documents, in the steps from the fold's place to `stop`.

    Args:
        fold: The fold of the run; stands at `stop` afterwards.
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
        fold: The fold of the run, standing at the step.
        names: The names of its sources.

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


# --- Why a part never draws a document, whatever the number of steps.
#
# A reason is said only where it holds for every step of the recipe as it is; an earlier recipe of the run may have
# drawn the row. Cost: a search in the kept rows of each stream, for each source.


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
    longest = longest_of(part.sources[name], most_length(part.batch))
    masks = {
        f"{part.name} uses the rows {start} to {stop} of {name}": (rows < start) | (rows >= stop),
        "it has no tokens": tokens == 0,
        "a deny-list names it": np.isin(rows, catalog.denied_rows.get(name, ())),
        f"overflow: drop leaves out what is longer than {longest} tokens": (tokens > longest)
        & (overflow_of(part.sources[name], part.packing) == "drop"),
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


# --- A deny-list: documents that a run is no longer to have, as Parquet.
#
# It appears whole or not at all; each document stands once.

DENY_LIST = pa.schema([("source", pa.string()), ("row", pa.int64())])


def deny_list(rows: Mapping[str, Int64Array]) -> pa.Table:
    """Rows of sources as a table, by source and row; each once."""
    tables = [DENY_LIST.empty_table()]
    for name, of_source in sorted(rows.items()):
        distinct = np.unique(of_source)
        tables.append(pa.table({"source": [name] * len(distinct), "row": distinct}, schema=DENY_LIST))
    return pa.concat_tables(tables)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, whole or not at all.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full; an older file stays.
    """
    with put_whole(path, f".{path.name}.partial") as aside:
        pq.write_table(table, aside)
