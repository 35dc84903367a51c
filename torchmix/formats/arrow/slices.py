"""Rows of a record batch that can be read alone: by a slice of their offsets and a slice of their values.

In: a batch without compression. Out: runs of its rows, each with two ranges of bytes; later, an array from the two.
Must hold: rows whose values begin in the same PAGE_BYTES of the batch's values are one run, and rows without bytes at
the batch's end are of the last one; so runs follow from the file alone. Which rows are null is not in the slices: the
catalog knows it, since a null has no tokens. Cost: to find runs the offsets of a batch are read; to read one nothing
else.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.formats.arrow.layout import Column, read_nulls
from torchmix.formats.arrow.message import BatchLayout

PAGE_BYTES = 64 << 10
_OFFSET_BYTES_OF_TEXT = {pa.string(): 4, pa.large_string(): 8, pa.binary(): 4, pa.large_binary(): 8}

Range = tuple[int, int]
"""First byte in a batch's body, and bytes."""


class SliceableColumn(msgspec.Struct, frozen=True, kw_only=True):
    """Where the parts of a column lie in the body of a batch."""

    validity: tuple[tuple[Range, int], ...]
    """Bits that tell which rows, or structs around them, are null, and how many are; none where no row is."""
    offsets: Range | None
    """Where values of rows begin; None for lists of a fixed size."""
    values: Range


class SliceType(msgspec.Struct, frozen=True, kw_only=True):
    """How rows of a type lie in buffers."""

    offset_bytes: int
    """Bytes of an offset; 0 for lists of a fixed size."""
    value_bytes: int
    list_size: int
    """Values of a list of a fixed size, else 0."""
    value_type: pa.DataType | None
    """The type of a list's values; None for text."""


def slice_type(column: Column) -> SliceType | None:
    """How rows of a column lie in buffers; None where they are not two slices of buffers."""
    within = [held_type for held_type in column.types() if not isinstance(held_type, pa.StructType)]
    if len(within) != len(column.path) + 1 - _num_structs(column):
        return None  # structs within a list
    outer, leaf = within[0], within[-1]
    if len(within) == 1:
        if outer not in _OFFSET_BYTES_OF_TEXT:
            return None
        return SliceType(offset_bytes=_OFFSET_BYTES_OF_TEXT[outer], value_bytes=1, list_size=0, value_type=None)
    is_fixed = isinstance(outer, pa.FixedSizeListType)
    is_list = is_fixed or isinstance(outer, pa.ListType | pa.LargeListType)
    if len(within) > 2 or not is_list or not pa.types.is_integer(leaf) or (is_fixed and not outer.list_size):
        return None
    return SliceType(
        offset_bytes=0 if is_fixed else 8 if isinstance(outer, pa.LargeListType) else 4,
        value_bytes=leaf.bit_width // 8,
        list_size=outer.list_size if is_fixed else 0,
        value_type=leaf,
    )


def find_slices(column: Column, layout: BatchLayout) -> SliceableColumn | None:
    """Where the parts of a column lie; None where its rows cannot be read alone.

    Raises:
        ValueError: The batch has fewer buffers than the schema.
    """
    kind = slice_type(column)
    if kind is None or layout.codec is not None or not layout.num_rows:
        return None
    walk, held_type = column.begin(layout, ()), column.held_type
    nulls: list[tuple[int, int]] = []
    for i in column.path[: _num_structs(column)]:
        nulls.append((walk.buffer, walk.node))
        held_type = walk.descend(held_type, (i,))
    is_list = kind.value_type is not None
    if walk.node + is_list >= len(layout.nodes):
        raise ValueError("a batch has fewer fields than the schema")
    if is_list and layout.nodes[walk.node + 1, 1]:
        return None  # nulls inside lists: the whole batch is read, to say which
    offsets = None if kind.list_size else _range(layout, walk.buffer + 1)
    values = _range(layout, walk.buffer + 1 + (not kind.list_size) + is_list)
    if not values[1]:
        return None
    nulls.append((walk.buffer, walk.node))
    validity = [(_range(layout, buffer), int(layout.nodes[node, 1])) for buffer, node in nulls]
    return SliceableColumn(
        validity=tuple(bits for bits in validity if bits[0][1] or bits[1]), offsets=offsets, values=values
    )


def _num_structs(column: Column) -> int:
    """Structs around the column, before any list."""
    types = list(column.types())
    return next((i for i, held_type in enumerate(types) if not isinstance(held_type, pa.StructType)), len(types))


def row_starts(kind: SliceType, num_rows: int, offsets: bytes, values_bytes: int) -> Int64Array:
    """Where the values of each row begin, in bytes of the batch's values, and where the last one ends: [rows + 1].

    Raises:
        ValueError: Offsets are too few, fall, or lead beyond the values.
    """
    if kind.list_size:
        row_bytes = kind.list_size * kind.value_bytes
        if num_rows * row_bytes > values_bytes:
            raise ValueError(f"{values_bytes} bytes of values for {num_rows} rows of {row_bytes}")
        starts = np.arange(num_rows + 1, dtype=np.int64) * row_bytes
    else:
        wanted_bytes = (num_rows + 1) * kind.offset_bytes
        if len(offsets) < wanted_bytes:
            raise ValueError(f"{len(offsets)} bytes of offsets for {num_rows} rows")
        starts = np.frombuffer(offsets[:wanted_bytes], f"<i{kind.offset_bytes}").astype(np.int64) * kind.value_bytes
    if starts[0] < 0 or (np.diff(starts) < 0).any() or starts[-1] > values_bytes:
        raise ValueError(f"offsets fall, or lead beyond the {values_bytes} bytes of values")
    return starts


def null_rows(validity: list[tuple[bytes, int]], num_rows: int) -> NDArray[np.bool_]:
    """Which rows are null, by the bits of the column and of the structs around it, each with the number of its nulls.

    Raises:
        ValueError: There are fewer bits than rows, or other nulls.
    """
    is_null = np.zeros(num_rows, dtype=bool)
    for bits, num_nulls in validity:
        is_null |= read_nulls(bits, num_rows, num_nulls)
    return is_null


def cut_rows(starts: Int64Array) -> Int64Array:
    """The first row of each run, and the number of rows; `starts` as `row_starts` gives them, some row with bytes."""
    cell = starts[:-1] // PAGE_BYTES
    last = int(np.flatnonzero(np.diff(starts))[-1])
    cell[last:] = cell[last]  # rows behind it have no bytes of their own
    return np.concatenate([[0], np.flatnonzero(np.diff(cell)) + 1, [len(cell)]])


def read_slices(
    kind: SliceType, offsets: bytes | memoryview, values: bytes | memoryview, is_null: NDArray[np.bool_]
) -> pa.Array:
    """The rows of a run.

    Args:
        kind: How they lie.
        offsets: [(rows + 1) * offset_bytes] theirs, as in the file.
        values: The bytes between the first and the last of them.
        is_null: [rows] which rows are null.

    Returns:
        [rows] large_string, or large_list of integers where a null is an empty list.

    Raises:
        ValueError: The slices do not belong together.
    """
    num_rows = len(is_null)
    if kind.list_size:
        starts = np.arange(num_rows + 1, dtype=np.int64) * kind.list_size
    else:
        starts = np.frombuffer(offsets, f"<i{kind.offset_bytes}").astype(np.int64)
        starts -= starts[:1]
    if len(starts) != num_rows + 1 or starts[-1] * kind.value_bytes != len(values) or (np.diff(starts) < 0).any():
        raise ValueError(f"{len(values)} bytes of values do not belong to the offsets of {num_rows} rows")
    if kind.value_type is None:
        bits = None
        if is_null.any():
            bits = pa.py_buffer(np.packbits(~is_null, bitorder="little"))
        return pa.Array.from_buffers(pa.large_string(), num_rows, [bits, pa.py_buffer(starts), pa.py_buffer(values)])
    tokens = pa.Array.from_buffers(kind.value_type, int(starts[-1]), [None, pa.py_buffer(values)])
    if is_null.any() and np.diff(starts)[is_null].any():  # what lies behind a null is no part of it
        sizes = np.where(is_null, 0, np.diff(starts))
        tokens = tokens.filter(pa.array(np.repeat(~is_null, np.diff(starts))))
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return pa.LargeListArray.from_arrays(pa.array(starts), tokens)


def _range(layout: BatchLayout, buffer: int) -> Range:
    if buffer >= len(layout.buffers):
        raise ValueError("a batch has fewer buffers than the schema")
    offset, num_bytes = layout.buffers[buffer].tolist()
    return offset, num_bytes
