"""A look at one file of a source: its columns, and how much of it is what one trains on.

In: a file and its format. Out: the columns that hold text or lists of integers, and the ids that a byte of the file
becomes, about. Must hold: only a footer, a schema or the first lines are read. Cost: one or two reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from torchmix.errors import SourceUnreadable
from torchmix.formats.column import Kind, columns_of
from torchmix.formats.jsonl.frames import codec_of_name
from torchmix.formats.megatron.files import index_path
from torchmix.formats.megatron.header import read_header
from torchmix.storage.open_path import opened
from torchmix.storage.stores import is_uri, open_store

LOOK_BYTES = 1 << 20
LOOK_LINES = 200
ID_BYTES = 4
"""Of text, about, for each id of a vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundColumn:
    """A column that could be trained on."""

    name: str
    kind: Kind
    share: float
    """Of text its bytes, and of tokens their number, for each byte of the file; about."""


def look_at(file: str, format: str) -> list[FoundColumn]:
    """The columns of a file, in its order; of a Megatron dataset one without a name.

    Raises:
        SourceUnreadable: It cannot be opened, or is of another format.
    """
    try:
        if format == "megatron":
            return [_megatron(file)]
        if format == "jsonl":
            return list(_json_lines(file))
        return list(_arrow(file) if format == "arrow" else _parquet(file))
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise SourceUnreadable(f"{file}: cannot be looked at as {format}: {reason}") from None


def sizes_of(files: tuple[str, ...]) -> int:
    """Bytes of files, of one store or of this machine."""
    if is_uri(files[0]):
        store = open_store(files[0])
        return sum(info.size or 0 for info in store.system.get_file_info([store.path(file) for file in files]))
    return sum(info.size for info in fs.LocalFileSystem().get_file_info(list(files)))


def _parquet(file: str) -> Iterator[FoundColumn]:
    with _input(file) as stream:
        num_bytes = stream.size()
        parquet = pq.ParquetFile(stream)
        metadata = parquet.metadata
        text_bytes: dict[str, int] = {}
        values: dict[str, int] = {}
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(number)
                top = chunk.path_in_schema.partition(".")[0]
                text_bytes[top] = text_bytes.get(top, 0) + chunk.total_uncompressed_size
                values[top] = values.get(top, 0) + chunk.num_values
        for name, kind in columns_of(parquet.schema_arrow):
            held = text_bytes if kind == "text" else values
            yield FoundColumn(name=name, kind=kind, share=held.get(name.partition(".")[0], 0) / max(1, num_bytes))


def _arrow(file: str) -> Iterator[FoundColumn]:
    with _input(file) as stream:
        try:
            reader = pa.ipc.open_file(stream)
            batch = reader.get_batch(0) if reader.num_record_batches else None
        except pa.ArrowInvalid:  # a stream has no footer
            stream.seek(0)
            reader = pa.ipc.open_stream(stream)
            batch = next(iter(reader), None)
        for name, kind in columns_of(reader.schema):
            top = reader.schema.get_field_index(name.partition(".")[0])
            held = 0 if batch is None or not batch.nbytes or top < 0 else batch.column(top).nbytes / batch.nbytes
            yield FoundColumn(name=name, kind=kind, share=held if kind == "text" else held / ID_BYTES)


def _json_lines(file: str) -> Iterator[FoundColumn]:
    codec = codec_of_name(file)
    with _input(file) as stream:
        lines_of = pa.CompressedInputStream(stream, codec) if codec is not None else stream
        content = lines_of.read(LOOK_BYTES)
        read_bytes = max(1, stream.tell())
    lines = content.splitlines()
    if len(content) == LOOK_BYTES and len(lines) > 1:
        lines.pop()  # it may be cut
    rows = [_row(line, file) for line in lines[:LOOK_LINES] if line.strip()]
    seen_bytes = max(1, sum(len(line) for line in lines[:LOOK_LINES]))
    names = set(rows[0]).intersection(*rows) if rows else set()
    for name in (name for name in (rows[0] if rows else ()) if name in names):
        values = [row[name] for row in rows if row[name] is not None]
        is_tokens = any(values) and all(
            isinstance(value, list) and all(type(item) is int for item in value) for value in values
        )
        if is_tokens or (values and all(isinstance(value, str) for value in values)):
            held = sum(len(value) if is_tokens else len(value.encode("utf-8", "replace")) for value in values)
            share = held / seen_bytes * len(content) / read_bytes
            yield FoundColumn(name=name, kind="tokens" if is_tokens else "text", share=share)


def _row(line: bytes, file: str) -> dict[str, Any]:
    """The keys of a line, those of objects in it by their paths."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SourceUnreadable(f"{file}: a line is no JSON ({error}): {line[:60]!r}") from None
    if not isinstance(row, dict):
        raise SourceUnreadable(f"{file}: a line is no object, with a key for each column: {line[:60]!r}")
    return dict(_flat(row, ""))


def _flat(row: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _megatron(file: str) -> FoundColumn:
    path = index_path(file)
    with opened(path, path) as index:
        header = read_header(index, path)
    return FoundColumn(name="", kind="tokens", share=1 / header.dtype.itemsize)


def _input(file: str) -> Any:
    if is_uri(file):
        store = open_store(file)
        return store.system.open_input_file(store.path(file))
    return fs.LocalFileSystem().open_input_file(file)
