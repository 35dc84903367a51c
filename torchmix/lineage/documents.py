"""Documents as a person names them: a row of a source, or an id.

In: words as `web:1234`, ids, and a catalog with what it keeps of properties. Out: rows of sources; the ids of rows.
Must hold: an id stands for every row that has it, in any source that names its rows. Cost: a look at the kept column of
ids of each source; no data file is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import PropertiesEntry
from torchmix.catalog.properties.rows import PropertyRows
from torchmix.catalog.store import SourceCatalog
from torchmix.errors import OptionError
from torchmix.recipe.build import listed, nearest

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
