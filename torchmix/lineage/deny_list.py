"""A deny-list: documents that a run is no longer to have, as Parquet.

In: rows of sources. Out: a file with the columns `source` and `row`. Must hold: it appears whole or not at all; each
document stands once. Cost: that of writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.array_types import Int64Array

DENY_LIST = pa.schema([("source", pa.string()), ("row", pa.int64())])


def deny_list(rows: Mapping[str, Int64Array]) -> pa.Table:
    """Rows of sources as a table, by source and row; each once."""
    tables = [DENY_LIST.empty_table()]
    for name, of_source in sorted(rows.items()):
        distinct = np.unique(of_source)
        tables.append(pa.table({"source": [name] * len(distinct), "row": distinct}, schema=DENY_LIST))
    return pa.concat_tables(tables)


def write_whole(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, whole or not at all.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full; an older file stays.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        pq.write_table(table, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
