"""A look at one Arrow file: its schema and first batch -> the columns that one may train on."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from torchmix.formats.documents.look import columns_beside
from torchmix.formats.found_column import ID_BYTES, FoundColumn, open_input
from torchmix.formats.images.look import images_in, possible_leaves


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/found_column.py`."""
    with open_input(file) as stream:
        try:
            reader = pa.ipc.open_file(stream)
            batch = reader.get_batch(0) if reader.num_record_batches else None
        except pa.ArrowInvalid:  # a stream has no footer
            stream.seek(0)
            reader = pa.ipc.open_stream(stream)
            batch = next(iter(reader), None)
        images = []
        if batch is not None and batch.nbytes:
            images = list(images_in(batch, possible_leaves(reader.schema), batch.num_rows / batch.nbytes))
        yield from images
        for name, kind in columns_beside(images, reader.schema):
            top = reader.schema.get_field_index(name.partition(".")[0])
            held = 0 if batch is None or not batch.nbytes or top < 0 else batch.column(top).nbytes / batch.nbytes
            yield FoundColumn(name=name, kind=kind, share=held / ID_BYTES if kind == "tokens" else held)
