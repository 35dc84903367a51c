"""What a Parquet file holds, by pyarrow's reading of the whole file and plain Python: the oracle of reading by page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.pages import documents_by_page
from torchmix.formats.parquet.source import ParquetSource
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT

Columns = dict[str, tuple[str, list[list[int]]]]


def columns_of_file(path: Path) -> Columns:
    """Each column that can be a source, with its kind, and the documents of all rows.

    A column with a null in the place of a token is left out, and so is one whose name is not its own.
    """
    table = pq.read_table(path, partitioning=None)
    found: Columns = {}
    for field in table.schema:
        rows = table.column(field.name).to_pylist()
        for names, kind in _leaves(field.type, [], 0):
            name = ".".join([field.name, *names])
            try:
                documents = [_document(row, names, kind) for row in rows]
            except TypeError:
                continue
            found[name] = kind, documents
    return found


def assert_reads_as_a_whole(path: Path, *, most_pages: int = 7) -> int:
    """Scan every column of a file, and decode it page by page and in runs; returns how many columns there were."""
    columns = columns_of_file(path)
    for name, (kind, documents) in columns.items():
        source = ParquetSource(name="s", column=name, kind=kind)  # type: ignore[arg-type]
        scan = source.scan(path)
        assert scan.tokens.tolist() == [len(document) for document in documents], (path.name, name)
        assert (scan.page_rows > 0).all()
        for together in (1, most_pages):
            assert documents_by_page(source, path, scan, most_pages=together) == documents, (path.name, name, together)
    return len(columns)


def _leaves(type: pa.DataType, names: list[str], num_lists: int) -> Iterator[tuple[list[str], str]]:
    if isinstance(type, pa.BaseExtensionType):
        yield from _leaves(type.storage_type, names, num_lists)
    elif isinstance(type, pa.DictionaryType):
        yield from _leaves(type.value_type, names, num_lists)
    elif isinstance(type, pa.StructType):
        for field in type:
            yield from _leaves(field.type, [*names, field.name], num_lists)
    elif isinstance(type, pa.MapType):
        yield from _leaves(type.key_type, [*names, "key"], num_lists + 1)
        yield from _leaves(type.item_type, [*names, "value"], num_lists + 1)
    elif hasattr(type, "value_type"):
        yield from _leaves(type.value_type, names, num_lists + 1)
    elif pa.types.is_integer(type) and num_lists:
        yield names, "tokens"
    elif str(type).startswith(("string", "large_string", "binary", "large_binary")) and not num_lists:
        yield names, "text"


def _document(row: Any, names: list[str], kind: str) -> list[int]:
    if kind == "tokens":
        return list(_tokens(row, names))
    for name in names:
        row = None if row is None else row[name]
    if row is None:
        return []
    return [*(row.encode() if isinstance(row, str) else row), END_OF_DOCUMENT]


def _tokens(value: Any, names: list[str]) -> Iterator[int]:
    """All integers below a value, in order; TypeError where one is null."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict):
        if value[names[0]] is None and len(names) == 1:
            return
        yield from _tokens(value[names[0]], names[1:])
    elif isinstance(value, tuple):  # of a map
        yield from _tokens(value[names[0] == "value"], names[1:])
    elif value is not None:
        for entry in value:
            yield from _tokens(entry, names)
