"""Other columns of an Arrow file or stream: the properties of its rows.

In: a path and names of columns. Out: a table with a row for each row of the file. Must hold: rows are those of the
file, in order, so they fit those of a scan. Cost: the batches are read once; of other columns the bytes are read, and
not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from torchmix.errors import SourceUnreadable
from torchmix.formats.arrow.batches import MAGIC
from torchmix.recipe.build import nearest
from torchmix.storage.byte_stream import ByteStream
from torchmix.storage.open_path import opened


def read_properties(path: str | Path, columns: Sequence[str], where: str) -> pa.Table:
    """The named top-level columns of a file.

    Raises:
        SourceUnreadable: No such file or column, or not an Arrow file, which is `where`.
    """
    with opened(path, where) as file:
        is_file = file.read(0, len(MAGIC)) == MAGIC
        try:
            stream = pa.PythonFile(ByteStream(file), mode="r")
            reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
            names = reader.schema.names
            for column in columns:
                if column not in names:
                    raise SourceUnreadable(
                        f"it has no column {column!r} for a property{nearest(column, names)}; it has {', '.join(names)}"
                    )
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            schema = pa.schema([reader.schema.field(column) for column in columns])
            return pa.Table.from_batches([batch.select(list(columns)) for batch in batches], schema=schema)
        except pa.ArrowException as error:
            raise SourceUnreadable(f"its properties cannot be read: {error}") from None
