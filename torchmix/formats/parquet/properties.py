"""Other columns of a Parquet file: the properties of its rows.

In: a path and names of columns. Out: a table with a row for each row of the file. Must hold: rows are those of the
file, in order, so they fit those of a scan. Cost: pyarrow decodes these columns once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.errors import SourceUnreadable
from torchmix.recipe.build import nearest
from torchmix.storage.byte_stream import ByteStream
from torchmix.storage.open_path import opened


def read_properties(path: str | Path, columns: Sequence[str], where: str) -> pa.Table:
    """The named top-level columns of a file, as Arrow's types.

    Raises:
        SourceUnreadable: No such file or column, or not a Parquet file, which is `where`.
    """
    with opened(path, where) as file:
        try:
            parquet = pq.ParquetFile(pa.PythonFile(ByteStream(file), mode="r"))
            names = parquet.schema_arrow.names
            for column in columns:
                if column not in names:
                    raise SourceUnreadable(
                        f"it has no column {column!r} for a property{nearest(column, names)}; it has {', '.join(names)}"
                    )
            return parquet.read(columns=list(columns)).select(list(columns))
        except pa.ArrowException as error:
            raise SourceUnreadable(f"its properties cannot be read: {error}") from None
