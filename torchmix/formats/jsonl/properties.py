"""Other keys of a file of JSON lines: the properties of its rows.

In: a path and keys. Out: a table with a row for each line that is not blank. Must hold: rows are those of a scan, in
order; a key that a line lacks is null there. Cost: each line is parsed once, as far as these keys.

A key's values may differ in type from line to line. Whole and broken numbers become broken ones; numbers and text
together, or any other two types, become the text of their JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from torchmix.errors import SourceUnreadable
from torchmix.formats.jsonl.frames import codec_of_name
from torchmix.formats.jsonl.lines import lines_of_rows
from torchmix.formats.jsonl.pages import cut_pages
from torchmix.formats.jsonl.surrogates import without_lone_surrogates
from torchmix.storage.open_path import opened


def read_properties(path: str | Path, columns: Sequence[str], where: str) -> pa.Table:
    """The named top-level keys of a file's lines.

    Raises:
        SourceUnreadable: No such file, which is `where`, or no line with one of the keys.
    """
    decoder = msgspec.json.Decoder(_row_type(columns))
    values: dict[str, list[Any]] = {column: [] for column in columns}
    with opened(path, where) as file:
        for page in cut_pages(file.read, codec_of_name(str(path))):
            for line in lines_of_rows(page.lines, is_first=page.offset == 0):
                try:
                    row = _decode(decoder, line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    row = None  # a bad row, which a scan has judged: it has no properties
                for number, column in enumerate(columns):
                    values[column].append(None if row is None else getattr(row, f"value{number}"))
    for column, found in values.items():
        if found and all(value is None for value in found):
            raise SourceUnreadable(f"no line has a value at key {column!r}, which is named as a property", where)
    return pa.table({column: _array(found) for column, found in values.items()})


def _decode(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError:
        whole = without_lone_surrogates(line)
        if whole is None:
            raise
        return decoder.decode(whole)


def _row_type(columns: Sequence[str]) -> type[msgspec.Struct]:
    """A row of which only these keys are read."""
    fields: list[Any] = [(f"value{number}", Any, None) for number in range(len(columns))]
    rename = {f"value{number}": column for number, column in enumerate(columns)}
    return msgspec.defstruct("Properties", fields, rename=rename, gc=False)


def _array(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        texts = [None if value is None else _text(value) for value in values]
        return pa.array(texts, pa.string())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
