"""A column of an Arrow file: its place in every record batch, and the rows of it that can be read alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable
from torchmix.formats.arrow.messages import ArrowFile, BatchLayout
from torchmix.formats.column import Kind, find_leaf

# --- A column of an Arrow file: its place in every record batch, and its bytes there -> an Arrow array.
#
# A column's buffers are consecutive, parents before children
# (https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message); an array that is given out was checked, so
# that no damaged offset leads outside of it; what lies behind a null is no part of it. Cost: buffers without
# compression are not copied; the check reads offsets, and views, once.

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
            layout: The layout of the batch.
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


# --- A column's name -> the column of an Arrow file.
#
# Names and what they may hold are those of Parquet columns (formats/column.py).

_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def find_column(file: ArrowFile, name: str, kind: Kind) -> tuple[Column, int | None]:
    """The column of this name, and the number of its dictionary in the file.

    Raises:
        SourceUnreadable: There is none, or it holds something else, or nothing that can be read by parts.
    """
    number = find_leaf(file.schema, name, kind)
    places = [(index, path) for index, field in enumerate(file.schema) for path in _leaves(field.type)]
    index, path = places[number]
    column = column_of(file.schema, index, path, file.version)
    leaf_type, dictionary_type = column.leaf_type, column.dictionary_type
    if pa.types.is_run_end_encoded(leaf_type) or (dictionary_type is not None and dictionary_type.num_fields):
        raise SourceUnreadable(f"column {name!r} holds {leaf_type}, which is not read; write it as plain values")
    if {leaf_type, dictionary_type} & {pa.string_view(), pa.binary_view()} and not reads_views():
        raise SourceUnreadable(
            f"column {name!r} is {leaf_type}, which pyarrow {pa.__version__} does not read from parts of a "
            "file; update pyarrow"
        )
    field = file.fields[index]
    for i in path:
        field = field.tables(5)[i]
    encoding = field.table(4)
    return column, encoding.number(0, "<q") if encoding is not None else None


def _leaves(held_type: pa.DataType) -> Iterator[tuple[int, ...]]:
    """Paths of the leaves within a type, in the order of `find_leaf`; what is encoded is a leaf of this path."""
    if isinstance(held_type, pa.BaseExtensionType):
        yield from _leaves(held_type.storage_type)
    elif isinstance(held_type, pa.DictionaryType | pa.RunEndEncodedType):
        yield from (() for _ in _leaves(held_type.value_type))
    elif isinstance(held_type, (*_LISTS, pa.MapType, pa.StructType)):
        for i in range(held_type.num_fields):
            yield from ((i, *path) for path in _leaves(held_type.field(i).type))
    else:
        yield ()


# --- Rows of a record batch that can be read alone: by a slice of their offsets and a slice of their values.
#
# Rows whose values begin in the same PAGE_BYTES of the batch's values are one run, and rows without bytes at the
# batch's end are of the last one; so runs follow from the file alone. Which rows are null is not in the slices: the
# catalog knows it, since a null has no tokens. Cost: to find runs the offsets of a batch are read; to read one nothing
# else.

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
