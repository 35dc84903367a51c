"""A look at one Parquet file: its footer -> the columns that one may train on."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.parquet as pq

from torchmix.formats.column import columns_of
from torchmix.formats.found_column import FoundColumn, open_input


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/found_column.py`."""
    with open_input(file) as stream:
        num_bytes = stream.size()
        parquet = pq.ParquetFile(stream)
        metadata = parquet.metadata
        text_bytes: dict[str, int] = {}
        values: dict[str, int] = {}
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(number)
                top = chunk.path_in_schema.partition(".")[0]
                text_bytes[top] = text_bytes.get(top, 0) + chunk.total_uncompressed_size
                values[top] = values.get(top, 0) + chunk.num_values
        for name, kind in columns_of(parquet.schema_arrow):
            held = text_bytes if kind == "text" else values
            yield FoundColumn(name=name, kind=kind, share=held.get(name.partition(".")[0], 0) / max(1, num_bytes))
