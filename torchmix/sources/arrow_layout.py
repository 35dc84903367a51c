"""A column of an Arrow file: its place in every record batch, and its bytes there -> an Arrow array.

In: a batch's nodes and buffers, and the bytes of some. Out: which buffers are the column's, and its values as a list or
a string, whatever Arrow puts around them. Must hold: a column's buffers are consecutive, parents before children
(https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message); an array that is given out was checked, so
that no damaged offset leads outside of it. Cost: buffers without compression are not copied; the check reads offsets,
and views, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchmix.sources.arrow_message import BatchLayout

_VERSION_5 = 4
_OFFSET_BYTES = {pa.string(): 4, pa.large_string(): 8}
_BINARY_OF_STRING = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column, or a field of its structs, and where it lies in every batch of a file."""

    held_type: pa.DataType
    """Of the whole top-level column."""
    path: tuple[int, ...]
    """Which field of the column, which one of that, and so on; empty for the column itself."""
    nodes_before: int
    """Nodes of the columns before it."""
    buffers_before: int
    """Their buffers, without those that hold what views show."""
    views_before: int
    """Their fields of views."""
    version: int
    """`Message.version`."""

    @property
    def leaf_type(self) -> pa.DataType:
        """What the field holds."""
        leaf = self.held_type
        for i in self.path:
            leaf = leaf.field(i).type
        return leaf

    @property
    def dictionary_type(self) -> pa.DataType | None:
        """What the dictionary within the field holds; None if there is none."""
        within = _with_children(self.leaf_type)
        return next((one.value_type for one in within if pa.types.is_dictionary(one)), None)

    @property
    def has_text_views(self) -> bool:
        """Whether views of text are within the field, those of a dictionary too."""
        return any(map(_is_view, (*_with_children(self.leaf_type), self.dictionary_type or pa.null())))

    def buffers(self, layout: BatchLayout) -> tuple[int, int]:
        """Which buffers of a batch hold the field, and what structs around it are null: [first, stop).

        Raises:
            ValueError: The batch has fewer.
        """
        walk = self._begin(layout, ())
        first = walk.buffer
        walk.skip(self._reach(walk)[0])
        if walk.buffer > len(layout.buffers) or walk.node > len(layout.nodes):
            raise ValueError("a batch has fewer fields or buffers than the schema")
        return first, walk.buffer

    def leaf(self, layout: BatchLayout) -> tuple[int, int, list[int]]:
        """The node and the first buffer of the field, and the buffers that tell which structs around it are null."""
        walk = self._begin(layout, ())
        _, structs = self._reach(walk)
        if walk.node + 1 + self.leaf_type.num_fields > len(layout.nodes):
            raise ValueError("a batch has fewer fields than the schema")
        return walk.node, walk.buffer, structs

    def read(self, layout: BatchLayout, buffers: Sequence[pa.Buffer | None], dictionary: pa.Array | None) -> pa.Array:
        """The field in one batch, null where a struct around it is null.

        Args:
            layout: Of the batch.
            buffers: Those of `buffers(layout)`, without compression; None for one of no bytes.
            dictionary: Values of the dictionary within the field, if there is one.

        Returns:
            [rows] as `as_plain`, checked; of a dictionary's values any type.

        Raises:
            ValueError: The buffers hold no such field, or lead outside of themselves.
        """
        walk = self._begin(layout, buffers)
        first = walk.buffer
        walk.first = first
        leaf_type, structs = self._reach(walk)
        try:
            array = as_plain(walk.read(leaf_type, dictionary))
            for place in structs:
                validity = buffers[place - first]
                if validity is not None:
                    is_valid = pa.Array.from_buffers(pa.bool_(), layout.num_rows, [None, validity])
                    is_valid.validate(full=True)
                    array = pc.if_else(is_valid, array, pa.scalar(None, array.type))
        except (pa.ArrowException, IndexError) as error:
            if isinstance(error, MemoryError):
                raise
            raise ValueError(str(error)) from None
        if len(array) != layout.num_rows:
            raise ValueError(f"the column has {len(array)} rows, the batch {layout.num_rows}")
        return as_plain(array)

    def _begin(self, layout: BatchLayout, buffers: Sequence[pa.Buffer | None]) -> _Walk:
        return _Walk(
            layout=layout,
            version=self.version,
            buffers=buffers,
            node=self.nodes_before,
            buffer=self.buffers_before + int(layout.variadic[: self.views_before].sum()),
            view=self.views_before,
        )

    def _reach(self, walk: _Walk) -> tuple[pa.DataType, list[int]]:
        """Go to the field; returns its type, and the buffers that tell which structs around it are null."""
        held_type, structs = self.held_type, []
        for i in self.path:
            structs.append(walk.buffer)
            walk.node, walk.buffer = walk.node + 1, walk.buffer + 1
            for j in range(i):
                walk.skip(held_type.field(j).type)
            held_type = held_type.field(i).type
        return held_type, structs


def column_of(schema: pa.Schema, index: int, path: tuple[int, ...], version: int) -> Column:
    """A top-level column of a file, or a field within it."""
    nodes = buffers = views = 0
    for field in list(schema)[:index]:
        for held_type in _with_children(field.type):
            nodes += 1
            buffers += _num_buffers(held_type, version)
            views += _is_view(held_type)
    return Column(
        held_type=schema.field(index).type,
        path=path,
        nodes_before=nodes,
        buffers_before=buffers,
        views_before=views,
        version=version,
    )


@lru_cache(maxsize=1)
def reads_views() -> bool:
    """Whether this pyarrow makes views from buffers; those of 2024 do not."""
    views = np.array([13, 0, 0, 0], np.int32)  # a text of 13 bytes, at byte 0 of the first buffer behind the views
    try:
        buffers = [None, pa.py_buffer(views), pa.py_buffer(b"thirteen long")]
        return bool(pa.Array.from_buffers(pa.string_view(), 1, buffers).cast(pa.large_string()).is_valid()[0].as_py())
    except (pa.ArrowException, ValueError):
        return False


def as_plain(array: pa.Array) -> pa.Array:
    """The same rows as large_list, string or large_string, without what else Arrow may put around the values."""
    if isinstance(array, pa.ExtensionArray):
        return as_plain(array.storage)
    if pa.types.is_dictionary(array.type):
        return as_plain(array.dictionary_decode())
    if _is_view(array.type):
        return array.cast(pa.large_string())
    if not array.type.num_fields:
        return array
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(), out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets), as_plain(array.flatten()))


@dataclass(kw_only=True, slots=True)
class _Walk:
    """Goes through the nodes and buffers of a batch, field by field."""

    layout: BatchLayout
    version: int
    buffers: Sequence[pa.Buffer | None]
    node: int
    buffer: int
    view: int
    first: int = 0
    """Which buffer of the batch is the first of `buffers`."""

    def skip(self, held_type: pa.DataType) -> None:
        """Pass over a field with its children."""
        for one in _with_children(held_type):
            self._enter(one)

    def read(self, held_type: pa.DataType, dictionary: pa.Array | None) -> pa.Array:
        """A field with its children; strings are read as binaries, since whether they are UTF-8 is not checked."""
        if isinstance(held_type, pa.BaseExtensionType):
            return self.read(held_type.storage_type, dictionary)
        if pa.types.is_dictionary(held_type):
            if dictionary is None:
                raise ValueError("its dictionary is missing")
            return pa.DictionaryArray.from_arrays(self.read(held_type.index_type, None), dictionary, safe=True)
        num_rows, num_nulls = self.layout.nodes[self.node].tolist()
        start = self.buffer - self.first
        num_buffers = self._enter(held_type)
        own = self.buffers[start : start + num_buffers]
        children = [self.read(held_type.field(i).type, dictionary) for i in range(held_type.num_fields)]
        read_as = _BINARY_OF_STRING.get(held_type, held_type)
        # Of a field without nulls the first one is absent; any other of no bytes is there.
        held = [*own[:1], *(pa.py_buffer(b"") if buffer is None else buffer for buffer in own[1:])]
        if num_nulls and (num_nulls > num_rows or not own or own[0] is None):
            raise ValueError(f"{num_nulls} of {num_rows} rows are null by the batch, and no bits say which")
        if held_type in _OFFSET_BYTES:
            held[1] = held[1].slice(0, _OFFSET_BYTES[held_type] * (num_rows + 1))
        if num_nulls and (_is_view(held_type) or _is_list_view(held_type)):
            held[1:3] = _without_nulls(held_type, num_rows, held)
        array = pa.Array.from_buffers(read_as, num_rows, held, -1 if num_nulls else 0, 0, children or None)
        array.validate(full=True)
        return array if read_as is held_type else array.view(held_type)

    def _enter(self, held_type: pa.DataType) -> int:
        """Take the node and the buffers of a field itself; returns how many they are."""
        num_buffers = _num_buffers(held_type, self.version)
        if _is_view(held_type):
            if self.view >= len(self.layout.variadic):
                raise ValueError("a batch has fewer views than the schema")
            num_buffers += int(self.layout.variadic[self.view])
            self.view += 1
        self.node += 1
        self.buffer += num_buffers
        return num_buffers


def _with_children(held_type: pa.DataType) -> Iterator[pa.DataType]:
    """A type and what is in it, as fields of a batch come; a dictionary's values are in messages of their own."""
    while isinstance(held_type, pa.BaseExtensionType):
        held_type = held_type.storage_type
    yield held_type
    if not pa.types.is_dictionary(held_type):
        for i in range(held_type.num_fields):
            yield from _with_children(held_type.field(i).type)


def _is_view(held_type: pa.DataType) -> bool:
    return held_type in (pa.string_view(), pa.binary_view())


def _is_list_view(held_type: pa.DataType) -> bool:
    return isinstance(held_type, pa.ListViewType | pa.LargeListViewType)


def _without_nulls(held_type: pa.DataType, num_rows: int, buffers: list[pa.Buffer]) -> list[pa.Buffer]:
    """The second and third buffer of a view, zero where a row is null: Arrow does not check what stands there, and
    follows it all the same."""
    row_bytes = 16 if _is_view(held_type) else 8 if isinstance(held_type, pa.LargeListViewType) else 4
    bits = np.frombuffer(buffers[0], np.uint8)
    if len(bits) * 8 < num_rows:
        raise ValueError(f"{len(bits)} bytes of validity for {num_rows} rows")
    is_null = np.unpackbits(bits, count=num_rows, bitorder="little") == 0
    cleared: list[pa.Buffer] = []
    for buffer in buffers[1 : 2 if _is_view(held_type) else 3]:
        if len(buffer) < num_rows * row_bytes:
            raise ValueError(f"{len(buffer)} bytes of views for {num_rows} rows")
        cells = np.frombuffer(buffer, np.uint8)[: num_rows * row_bytes].reshape(num_rows, row_bytes).copy()
        cells[is_null] = 0
        cleared.append(pa.py_buffer(cells))
    return cleared + buffers[1 + len(cleared) : 3]


def _num_buffers(held_type: pa.DataType, version: int) -> int:
    """Buffers of a field itself in a batch; of views without those that hold what they show."""
    if pa.types.is_null(held_type) or pa.types.is_run_end_encoded(held_type):
        return 0
    if pa.types.is_union(held_type):
        return int(held_type.num_buffers) - (version >= _VERSION_5)
    return int(held_type.num_buffers)
