"""An Arrow array of strings -> Python strings, a bounded number of bytes at a time.

In: an array of strings. Out: lists of texts, in order, None where a row is null. Must hold: what is not UTF-8
is an error that names its row; a batch has at most BATCH_BYTES of text, or one text. Cost: about 100 ns a text and 0.5
ns a byte. A vocabulary's encoder holds some 25 bytes for each byte of a batch while it works.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.errors import SourceUnreadable

BATCH_BYTES = 1 << 20
BATCH_TEXTS = 1 << 14


def text_batches(texts: pa.Array, first_row: int) -> Iterator[list[str | None]]:
    """Cut an array into batches.

    Args:
        texts: [documents], string or large_string, with or without nulls.
        first_row: Row of the first text, for messages.

    Raises:
        SourceUnreadable: A text is not UTF-8.
    """
    import pyarrow.compute as pc  # not needed for ids, and slow to load

    num_bytes = pc.fill_null(pc.binary_length(texts), 0)
    stop_byte = np.cumsum(num_bytes.to_numpy(zero_copy_only=False), dtype=np.int64)
    for start, stop in _ranges(stop_byte):
        batch = texts.slice(start, stop - start)
        try:
            yield batch.to_pylist()
        except UnicodeDecodeError as error:
            at, fault = _first_fault(batch, error)
            row = first_row + start + at
            raise SourceUnreadable(
                f"row {row} is not valid UTF-8: byte {fault.start} is "
                f"0x{fault.object[fault.start]:02x} ({fault.reason}); mend the text, or use tokenizer: bytes, which "
                "takes any bytes",
                row=row,
            ) from None


def _ranges(stop_byte: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(stop_byte):
        begin_byte = int(stop_byte[start - 1]) if start else 0
        fitting = int(np.searchsorted(stop_byte, begin_byte + BATCH_BYTES, side="right"))
        stop = min(max(fitting, start + 1), start + BATCH_TEXTS)
        yield start, stop
        start = stop


def _first_fault(batch: pa.Array, error: UnicodeDecodeError) -> tuple[int, UnicodeDecodeError]:
    for row in range(len(batch)):
        try:
            batch[row].as_py()
        except UnicodeDecodeError as fault:
            return row, fault
    raise error
