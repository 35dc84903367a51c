"""A column's name -> the column of an Arrow file.

In: a file's schema. Out: the column, and the number of its dictionary if it has one. Must hold: names and what they may
hold are those of Parquet columns (parquet_column.py). Cost: none.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from torchmix.errors import SourceUnreadable
from torchmix.formats.arrow.batches import ArrowFile
from torchmix.formats.arrow.layout import Column, column_of, reads_views
from torchmix.formats.column import Kind, find_leaf

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
