"""A column's name -> the column of an Arrow file.

In: a file's schema. Out: the column, and the number of its dictionary if it has one. Must hold: a name is that of a
top-level column, or else `a.b`, field `b` of the structs in column `a`; what the column holds is checked as a Parquet
column's is. Cost: none.
"""

from __future__ import annotations

import pyarrow as pa

from torchmix.errors import SourceUnreadable
from torchmix.sources.arrow_batches import ArrowFile
from torchmix.sources.arrow_layout import Column, column_of, reads_views
from torchmix.sources.arrow_message import FlatTable
from torchmix.sources.parquet_column import Kind, check_column


def find_column(file: ArrowFile, name: str, kind: Kind, where: str) -> tuple[Column, int | None]:
    """The column of this name, and the number of its dictionary in the file.

    Raises:
        SourceUnreadable: There is none, or it holds something else.
    """
    keys = [name] if name in file.schema.names else name.split(".")
    indices: list[int] = []
    fields = list(file.schema)
    for key in keys:
        names = [field.name for field in fields]
        if names.count(key) != 1:
            if not indices:
                check_column(pa.schema(fields), name, kind, where)
            listed = ", ".join(names) or "none"
            raise SourceUnreadable(f"{where}: no field {key!r} in column {name!r}; it has: {listed}")
        indices.append(names.index(key))
        held_type = fields[indices[-1]].type
        fields = [held_type.field(i) for i in range(held_type.num_fields)] if pa.types.is_struct(held_type) else []
    column = column_of(file.schema, indices[0], tuple(indices[1:]), file.version)
    check_column(pa.schema([pa.field(name, _as_list(column.leaf_type))]), name, kind, where)
    if column.has_text_views and not reads_views():
        raise SourceUnreadable(
            f"{where}: column {name!r} is {column.leaf_type}, which pyarrow {pa.__version__} does not read from parts "
            "of a file; update pyarrow"
        )
    dictionaries = _dictionaries(_field(file.fields, indices))
    if len(dictionaries) > 1:
        raise SourceUnreadable(
            f"{where}: column {name!r} is {column.leaf_type}, with a dictionary within another one; write it without"
        )
    return column, dictionaries[0] if dictionaries else None


def _as_list(held_type: pa.DataType) -> pa.DataType:
    """A view of a list as the list that it is read as."""
    if isinstance(held_type, pa.ListViewType | pa.LargeListViewType):
        return pa.large_list(held_type.value_type)
    return held_type


def _field(fields: list[FlatTable], indices: list[int]) -> FlatTable:
    for i in indices[:-1]:
        fields = fields[i].tables(5)
    return fields[indices[-1]]


def _dictionaries(field: FlatTable) -> list[int]:
    """Numbers of the dictionaries in a field of the file's schema, its children too."""
    encoding = field.table(4)
    own = [encoding.number(0, "<q")] if encoding is not None else []
    return own + [number for child in field.tables(5) for number in _dictionaries(child)]
