"""A column of an Arrow file: its place in every record batch, and its bytes there -> an Arrow array.

In: a batch's nodes and buffers, and the bytes of some. Out: which buffers are the column's, and its rows as lists or
strings, whatever Arrow puts around them. Must hold: a column's buffers are consecutive, parents before children
(https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message); an array that is given out was checked, so
that no damaged offset leads outside of it; what lies behind a null is no part of it. Cost: buffers without compression
are not copied; the check reads offsets, and views, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.formats.arrow.message import BatchLayout

_VERSION_5 = 4
_OFFSET_BYTES = {pa.string(): 4, pa.large_string(): 8, pa.binary(): 4, pa.large_binary(): 8}
_BINARY_OF_STRING = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
_VIEWS = (pa.string_view(), pa.binary_view())
_LIST_VIEWS = (pa.ListViewType, pa.LargeListViewType)


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf of a top-level column, and where it lies in every batch of a file."""

    held_type: pa.DataType
    """The type of the whole top-level column."""
    path: tuple[int, ...]
    """Which child of the column, which one of that, and so on down to the leaf; empty for a column without children."""
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
        """What the leaf holds; a dictionary where it has one."""
        return list(self.types())[-1]

    def types(self) -> Iterator[pa.DataType]:
        """The column's type, and those of its children down to the leaf."""
        held_type = _stored(self.held_type)
        yield held_type
        for i in self.path:
            held_type = _stored(held_type.field(i).type)
            yield held_type

    @property
    def dictionary_type(self) -> pa.DataType | None:
        """What the leaf's dictionary holds; None if it has none."""
        return self.leaf_type.value_type if pa.types.is_dictionary(self.leaf_type) else None

    def buffers(self, layout: BatchLayout) -> tuple[int, int]:
        """Which buffers of a batch lead to the leaf and hold it: [first, stop).

        Raises:
            ValueError: The batch has fewer.
        """
        walk = self.begin(layout, ())
        first = walk.buffer
        walk.skip(walk.descend(self.held_type, self.path))
        if walk.buffer > len(layout.buffers) or walk.node > len(layout.nodes):
            raise ValueError("a batch has fewer fields or buffers than the schema")
        return first, walk.buffer

    def read(self, layout: BatchLayout, buffers: Sequence[pa.Buffer | None], dictionary: pa.Array | None) -> pa.Array:
        """The leaf's values in one batch, within the lists that they are in.

        Args:
            layout: Of the batch.
            buffers: Those of `buffers(layout)`, without compression; None for one of no bytes.
            dictionary: Values of the leaf's dictionary, if it has one.

        Returns:
            [rows] lists, or what the leaf holds; checked. A null list, or one in a null struct, is empty.

        Raises:
            ValueError: The buffers hold no such column, or lead outside of themselves.
        """
        walk = self.begin(layout, buffers)
        walk.first = walk.buffer
        try:
            array = walk.read(self.held_type, self.path, dictionary)
        except (pa.ArrowException, IndexError) as error:
            if isinstance(error, MemoryError):
                raise
            raise ValueError(str(error)) from None
        if len(array) != layout.num_rows:
            raise ValueError(f"the column has {len(array)} rows, the batch {layout.num_rows}")
        return array

    def begin(self, layout: BatchLayout, buffers: Sequence[pa.Buffer | None]) -> Walk:
        """A walk that stands at the column."""
        return Walk(
            layout=layout,
            version=self.version,
            buffers=buffers,
            node=self.nodes_before,
            buffer=self.buffers_before + int(layout.variadic[: self.views_before].sum()),
            view=self.views_before,
        )


def column_of(schema: pa.Schema, index: int, path: tuple[int, ...], version: int) -> Column:
    """A leaf of a top-level column of a file."""
    nodes = buffers = views = 0
    for field in list(schema)[:index]:
        for held_type in _with_children(field.type):
            nodes += 1
            buffers += _num_buffers(held_type, version)
            views += held_type in _VIEWS
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


class Walk(msgspec.Struct, kw_only=True):
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

    def descend(self, held_type: pa.DataType, path: Sequence[int]) -> pa.DataType:
        """Go to a child, past those before it, and on; returns its type."""
        held_type = _stored(held_type)
        for i in path:
            self._enter(held_type)
            for j in range(i):
                self.skip(held_type.field(j).type)
            held_type = _stored(held_type.field(i).type)
        return held_type

    def read(self, held_type: pa.DataType, path: Sequence[int], dictionary: pa.Array | None) -> pa.Array:
        """A field, of whose children only those on the path are read."""
        held_type = _stored(held_type)
        if not path:
            return self._read_leaf(held_type, dictionary)
        num_rows, num_nulls, own = self._take(held_type)
        for j in range(path[0]):
            self.skip(held_type.field(j).type)
        child = self.read(held_type.field(path[0]).type, path[1:], dictionary)
        if isinstance(held_type, pa.StructType):
            if not num_nulls:
                return child
            array = pa.Array.from_buffers(pa.struct([("", child.type)]), num_rows, own[:1], num_nulls, 0, [child])
            array.validate(full=True)
            child = array.flatten()[0]
            return _plain_list(child) if child.type.num_fields else child
        if isinstance(held_type, pa.FixedSizeListType):
            read_as = pa.list_(child.type, held_type.list_size)
        elif isinstance(held_type, _LIST_VIEWS):
            make = pa.list_view if isinstance(held_type, pa.ListViewType) else pa.large_list_view
            read_as = make(child.type)
        else:
            read_as = pa.large_list(child.type) if isinstance(held_type, pa.LargeListType) else pa.list_(child.type)
        array = pa.Array.from_buffers(read_as, num_rows, own, -1 if num_nulls else 0, 0, [child])
        array.validate(full=True)
        return _plain_list(array)

    def _read_leaf(self, held_type: pa.DataType, dictionary: pa.Array | None) -> pa.Array:
        """Strings are read as binaries, since whether they are UTF-8 is not checked; views become binaries."""
        if pa.types.is_dictionary(held_type):
            if dictionary is None:
                raise ValueError("its dictionary is missing")
            indices = self._read_leaf(held_type.index_type, None)
            return pa.DictionaryArray.from_arrays(indices, dictionary, safe=True).dictionary_decode()
        num_rows, num_nulls, own = self._take(held_type)
        if held_type in _OFFSET_BYTES:
            offsets_bytes = _OFFSET_BYTES[held_type] * (num_rows + 1)
            if len(own[1]) < offsets_bytes and num_rows:
                raise ValueError(f"{len(own[1])} bytes of offsets for {num_rows} rows")
            own[1] = own[1].slice(0, offsets_bytes)
        read_as = _BINARY_OF_STRING.get(held_type, held_type)
        array = pa.Array.from_buffers(read_as, num_rows, own, -1 if num_nulls else 0)
        array.validate(full=True)
        if held_type in _VIEWS:
            return array.cast(pa.large_binary())
        return array if read_as is held_type else array.view(held_type)

    def _take(self, held_type: pa.DataType) -> tuple[int, int, list[pa.Buffer]]:
        """Rows, nulls and buffers of a field itself; without nulls, the first buffer may be None."""
        num_rows, num_nulls = self.layout.nodes[self.node].tolist()
        start = self.buffer - self.first
        own = self.buffers[start : start + self._enter(held_type)]
        held = [*own[:1], *(pa.py_buffer(b"") if buffer is None else buffer for buffer in own[1:])]
        if num_nulls and (num_nulls > num_rows or not own or own[0] is None):
            raise ValueError(f"{num_nulls} of {num_rows} rows are null by the batch, and no bits say which")
        if num_nulls:
            read_nulls(own[0], num_rows, num_nulls)
        if num_nulls and (held_type in _VIEWS or isinstance(held_type, _LIST_VIEWS)):
            _clear_nulls(held_type, num_rows, num_nulls, held)
        return num_rows, num_nulls, held

    def _enter(self, held_type: pa.DataType) -> int:
        """Pass over the node and the buffers of a field itself; returns how many they are."""
        num_buffers = _num_buffers(held_type, self.version)
        if held_type in _VIEWS:
            if self.view >= len(self.layout.variadic):
                raise ValueError("a batch has fewer views than the schema")
            num_buffers += int(self.layout.variadic[self.view])
            self.view += 1
        self.node += 1
        self.buffer += num_buffers
        return num_buffers


def read_nulls(bits: bytes | pa.Buffer, num_rows: int, num_nulls: int) -> NDArray[np.bool_]:
    """Which rows of a field are null.

    Raises:
        ValueError: There are fewer bits than rows, or other nulls than the batch says.
    """
    cells = np.frombuffer(bits, np.uint8)
    if len(cells) * 8 < num_rows:
        raise ValueError(f"{len(cells)} bytes of validity for {num_rows} rows")
    is_null: NDArray[np.bool_] = np.unpackbits(cells, count=num_rows, bitorder="little") == 0
    found = np.count_nonzero(is_null)
    if found != num_nulls:
        raise ValueError(f"{found} of {num_rows} rows are null by their bits, {num_nulls} by the batch")
    return is_null


def _plain_list(array: pa.Array) -> pa.Array:
    """Lists of any kind as they are if they lie end to end in order, else copied so; a null is then an empty list."""
    import pyarrow.compute as pc  # not needed for ids, and slow to load

    if isinstance(array.type, pa.ListType | pa.LargeListType) and not array.null_count:
        return array
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(), out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets), array.flatten())


def _stored(held_type: pa.DataType) -> pa.DataType:
    while isinstance(held_type, pa.BaseExtensionType):
        held_type = held_type.storage_type
    return held_type


def _with_children(held_type: pa.DataType) -> Iterator[pa.DataType]:
    """A type and what is in it, as fields of a batch come; a dictionary's values are in messages of their own."""
    held_type = _stored(held_type)
    yield held_type
    if not pa.types.is_dictionary(held_type):
        for i in range(held_type.num_fields):
            yield from _with_children(held_type.field(i).type)


def _clear_nulls(held_type: pa.DataType, num_rows: int, num_nulls: int, buffers: list[pa.Buffer]) -> None:
    """Put zeros into views where a row is null: Arrow does not check what stands there, and follows it all the same."""
    is_text = held_type in _VIEWS
    row_bytes = 16 if is_text else 8 if isinstance(held_type, pa.LargeListViewType) else 4
    is_null = read_nulls(buffers[0], num_rows, num_nulls)
    for i in (1,) if is_text else (1, 2):
        if len(buffers[i]) < num_rows * row_bytes:
            raise ValueError(f"{len(buffers[i])} bytes of views for {num_rows} rows")
        cells = np.frombuffer(buffers[i], np.uint8)[: num_rows * row_bytes].reshape(num_rows, row_bytes).copy()
        cells[is_null] = 0
        buffers[i] = pa.py_buffer(cells)


def _num_buffers(held_type: pa.DataType, version: int) -> int:
    """Buffers of a field itself in a batch; of views without those that hold what they show."""
    if pa.types.is_null(held_type) or pa.types.is_run_end_encoded(held_type):
        return 0
    if pa.types.is_union(held_type):
        return int(held_type.num_buffers) - (version >= _VERSION_5)
    return int(held_type.num_buffers)
