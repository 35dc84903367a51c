"""A look at one Parquet file: its footer -> the columns that one may train on."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.parquet as pq

from torchmix.formats.documents.look import columns_beside
from torchmix.formats.found_column import FoundColumn, open_input
from torchmix.formats.images.look import LOOKED_AT, images_in, possible_leaves

BUFFER_BYTES = 1 << 20
"""Bytes read at a time, so that a column whose first rows are looked at is not read whole."""


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/found_column.py`."""
    with open_input(file) as stream:
        num_bytes = stream.size()
        parquet = pq.ParquetFile(stream, buffer_size=BUFFER_BYTES, pre_buffer=False)
        metadata = parquet.metadata
        text_bytes: dict[str, int] = {}
        values: dict[str, int] = {}
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(number)
                top = chunk.path_in_schema.partition(".")[0]
                text_bytes[top] = text_bytes.get(top, 0) + chunk.total_uncompressed_size
                values[top] = values.get(top, 0) + chunk.num_values
        images = _images(parquet, num_bytes)
        yield from images
        for name, kind in columns_beside(images, parquet.schema_arrow):
            held = values if kind == "tokens" else text_bytes
            yield FoundColumn(name=name, kind=kind, share=held.get(name.partition(".")[0], 0) / max(1, num_bytes))


def _images(parquet: pq.ParquetFile, num_bytes: int) -> list[FoundColumn]:
    """The columns of images, by their first rows."""
    leaves = possible_leaves(parquet.schema_arrow)
    if not leaves:
        return []
    batch = next(parquet.iter_batches(LOOKED_AT, columns=sorted({leaf.partition(".")[0] for leaf in leaves})), None)
    return [] if batch is None else list(images_in(batch, leaves, parquet.metadata.num_rows / max(1, num_bytes)))
