"""A table of further properties, joined to rows by their id.

In: a table whose first column is the key, and the ids of rows. Out: its other columns for these rows. Must hold: each
key stands once, and every row finds its key: anything else is an error that names one, never a null. Cost: a hash table
of the keys for each data file.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from torchmix.errors import SideTableError


def check_keys(table: pa.Table, where: str) -> None:
    """Check the first column of a table, its key; `where` begins errors.

    Raises:
        SideTableError: A key is null or stands twice, or keys are neither text nor whole numbers.
    """
    name, keys = table.column_names[0], table.column(0)
    if not (pa.types.is_integer(keys.type) or pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type)):
        raise SideTableError(f"{where}: key {name!r} is {keys.type}; a key is text or a whole number")
    if keys.null_count:
        row = int(pc.index(keys.is_null(), True).as_py())
        raise SideTableError(f"{where}: row {row} has no key {name!r}; each row needs one")
    counts = pc.value_counts(keys)
    most = pc.greater(counts.field("counts"), 1)
    if pc.any(most).as_py():
        double = counts.field("values").filter(most)
        shown = ", ".join(repr(key.as_py()) for key in double[:3])
        raise SideTableError(
            f"{where}: {len(double):,} keys of {name!r} stand there more than once, as {shown}; keep one row of each"
        )


def join_rows(ids: pa.ChunkedArray, table: pa.Table, where: str) -> pa.Table:
    """The columns of a table beside its key, for rows with these ids.

    Args:
        ids: [rows] the id of each row.
        table: The key first; `check_keys` has passed it.
        where: The source and file of the rows, for errors.

    Raises:
        SideTableError: An id is no key of the table, or null.
    """
    keys = table.column(0).cast(pa.string()).combine_chunks()
    texts = ids.cast(pa.string()).combine_chunks()
    places = pc.index_in(texts, value_set=keys, skip_nulls=True)
    if places.null_count:
        missing = places.is_null()
        row = int(pc.index(missing, True).as_py())
        raise SideTableError(
            f"the table of properties lacks {places.null_count:,} of {len(ids):,} ids, as {ids[row].as_py()!r} of row "
            f"{row}; add a table that has them with torchmix properties add",
            where,
            row=row,
        )
    return table.select(table.column_names[1:]).take(places).combine_chunks()
