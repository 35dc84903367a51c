"""SQL over the properties of sources, as the catalog keeps them.

In: an open catalog of a part, what is kept of properties, and a query. Out: its rows. Must hold: a table has a row for
each document, with `tokens`; a query reads no data file, and reaches nothing outside. Cost: DuckDB's, over the columns
that the query names; a selection's rows are copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.catalog.manifest import PropertiesEntry
from torchmix.catalog.properties.database import open_database
from torchmix.catalog.properties.rows import PropertyRows
from torchmix.catalog.store import Catalog
from torchmix.errors import OptionError
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.parts import Part
from torchmix.recipe.source.properties import path_properties_of
from torchmix.recipe.streams import row_sets_of

_MISSING = re.compile(r"Table with name (.+?) does not exist!")


class QueryResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that a query gave."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def run_query(text: str, part: Part, catalog: Catalog, properties: Mapping[str, PropertiesEntry]) -> QueryResult:
    """Run a query whose tables are the sources of a part with all their rows, and its selections and children with the
    rows that they have.

    Args:
        text: A query in DuckDB's SQL.
        part: The part.
        catalog: Its catalog, with views.
        properties: What is kept of the properties of each source.

    Raises:
        OptionError: It is no such query; the message is DuckDB's, with a guess among these tables alone.
        CatalogStale: Properties of a file are not kept yet.
    """
    import duckdb

    names = [*part.sources, *(name for name in row_sets_of(part) if name not in part.sources)]
    with open_database() as database:
        for name in names:
            if name in text:  # tables that it does not name cost nothing
                database.register(name, _table(name, part, catalog, properties))
        try:
            found = database.execute(text)
            columns = tuple(column[0] for column in found.description or ())
            return QueryResult(columns=columns, rows=tuple(map(tuple, found.fetchall())))
        except duckdb.OutOfMemoryException as error:
            cause = " ".join(str(error).partition(".")[0].split())
            raise OptionError(
                f"query: it does not fit into memory, and nothing is written to a disk: {cause}; "
                "name fewer columns or rows, or leave ORDER BY out"
            ) from None
        except duckdb.Error as error:
            message = " ".join(str(error).partition("\nLINE ")[0].split())
            if missing := _MISSING.search(message):  # DuckDB's guess may be a table of its own
                message = f"there is no table {missing[1]!r}{nearest(missing[1], names)}"
            raise OptionError(f"query: {message}; tables are {listed(map(repr, names))}") from None


def _table(name: str, part: Part, catalog: Catalog, properties: Mapping[str, PropertiesEntry]) -> pa.Table:
    base = name if name in part.sources else row_sets_of(part)[name].source
    patterns = path_properties_of(part.sources[base])
    rows = PropertyRows(catalog.directory, catalog.sources[base], properties.get(base), patterns)
    table = rows.whole(rows.names)
    view = catalog.views.get(name)
    return table if name == base or view is None else table.take(pa.array(np.asarray(view.kept)))
