"""Deny-lists -> the rows of each source that they name.

Every line names a document that the sources have; a line that does not is an error, since whoever wrote it counts on
it. Cost: a list is read whole; ids are looked up in the ids that the catalog keeps, at one look a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import read_manifest
from torchmix.errors import CatalogStale, DenyListError
from torchmix.recipe.build import nearest
from torchmix.storage.store_file import opened
from torchmix.storage.stores import is_uri

Ids = Callable[[str], pa.ChunkedArray | None]
"""A source -> the id of each of its rows; None where the recipe gives it no `id`."""
SHOWN = 3
"""Values that an error shows."""


def rows_of_lists(
    base: Path, lists: Sequence[str], num_rows: Mapping[str, int], ids: Ids
) -> tuple[dict[str, Int64Array], dict[str, str]]:
    """The denied rows of each source, and the hash of each list.

    Args:
        base: The folder that paths are relative to.
        lists: Paths of the deny-lists.
        num_rows: Rows of each source.
        ids: The ids of a source's rows.

    Raises:
        DenyListError: A list has other columns, or a line names no document.
        SourceUnreadable: A list cannot be read.
    """
    found: dict[str, list[Int64Array]] = {name: [] for name in num_rows}
    hashes: dict[str, str] = {}
    for path in lists:
        content = _content(base, path)
        hashes[path] = _hash(content)
        for name, rows in _rows_of_list(path, content, num_rows, ids):
            found[name].append(rows)
    empty = np.zeros(0, np.int64)
    return {name: np.unique(np.concatenate([empty, *rows])) for name, rows in found.items()}, hashes


def check_lists(base: Path, lists: Sequence[str], catalog_folder: Path, sources: Collection[str]) -> None:
    """Refuse deny-lists that were altered since these sources were indexed.

    Raises:
        CatalogStale: Names the list.
        SourceUnreadable: A list cannot be read.
    """
    denied = read_manifest(catalog_folder).denied if lists else {}
    for path in lists:
        now = _hash(_content(base, path))
        indexed = {entry.lists[path] for name, entry in denied.items() if name in sources and path in entry.lists}
        if indexed - {now}:
            raise CatalogStale(f"deny-list {path} was altered since it was indexed; run torchmix index")


def _content(base: Path, path: str) -> bytes:
    with opened(path if is_uri(path) else base / path, f"deny-list {path}") as file:
        return file.read(0, file.num_bytes)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _rows_of_list(path: str, content: bytes, num_rows: Mapping[str, int], ids: Ids) -> list[tuple[str, Int64Array]]:
    try:
        table = pq.read_table(pa.BufferReader(content))
    except (OSError, pa.ArrowException) as error:
        raise DenyListError(f"deny-list {path} is no Parquet file: {error}") from None
    columns = set(table.column_names)
    if columns not in ({"source", "row"}, {"id"}, {"source", "id"}):
        raise DenyListError(
            f"deny-list {path} has columns {', '.join(table.column_names)}; it needs `source` and `row`, or `id`, or "
            f"`source` and `id`"
        )
    for name in sorted(columns):
        _check_column(path, name, table[name])
    sources = _sources(path, table, num_rows) if "source" in columns else {None: np.arange(len(table))}
    found = []
    if "row" in columns:
        rows = table["row"].cast(pa.int64()).to_numpy()
        for name, lines in sources.items():
            assert name is not None
            found.append((name, _checked_rows(path, name, rows[lines], num_rows[name])))
        return found
    texts = table["id"].cast(pa.string()).combine_chunks()
    for name, lines in sources.items():
        found += _by_id(path, texts.take(pa.array(lines)), [name] if name is not None else sorted(num_rows), ids)
    return found


def _check_column(path: str, name: str, column: pa.ChunkedArray) -> None:
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    is_whole = pa.types.is_integer(column.type)
    if not {"source": is_text, "row": is_whole, "id": is_text or is_whole}[name]:
        wanted = {"source": "text", "row": "a whole number", "id": "text or a whole number"}[name]
        raise DenyListError(f"deny-list {path}: column `{name}` is {column.type}, and must be {wanted}")
    if column.null_count:
        line = int(pc.index(column.is_null(), True).as_py())
        raise DenyListError(f"deny-list {path}: line {line} has no `{name}`")


def _sources(path: str, table: pa.Table, num_rows: Mapping[str, int]) -> dict[str | None, Int64Array]:
    """Lines of each source that a list names."""
    column = table["source"].to_numpy(zero_copy_only=False)
    found: dict[str | None, Int64Array] = {}
    for name in sorted(set(column.tolist())):
        lines = np.flatnonzero(column == name)
        if name not in num_rows:
            raise DenyListError(
                f"deny-list {path}: line {lines[0]} names source {name!r}, which the recipe does not have"
                f"{nearest(name, num_rows)}; it has {', '.join(num_rows)}"
            )
        found[name] = lines
    return found


def _checked_rows(path: str, name: str, rows: Int64Array, num_rows: int) -> Int64Array:
    wrong = rows[(rows < 0) | (rows >= num_rows)]
    if len(wrong):
        raise DenyListError(
            f"deny-list {path} names row {wrong[0]} of source {name!r}, which has {num_rows:,} rows, from 0 on: the "
            f"list was written for another catalog; write it again with torchmix trace --deny-from"
        )
    return rows


def _by_id(path: str, wanted: pa.Array, names: Sequence[str], ids: Ids) -> list[tuple[str, Int64Array]]:
    """Rows of sources whose id is wanted; each id must be found in one of them."""
    found, is_missing, with_ids = [], np.ones(len(wanted), np.bool_), 0
    for name in names:
        texts = ids(name)
        if texts is None:
            continue
        with_ids += 1
        texts = texts.cast(pa.string())
        found.append((name, np.flatnonzero(pc.is_in(texts, value_set=wanted).to_numpy().astype(np.bool_))))
        is_there = pc.is_in(wanted, value_set=texts.combine_chunks())
        is_missing &= ~is_there.to_numpy(zero_copy_only=False).astype(np.bool_)
    if not with_ids:
        which = f"source {names[0]!r} has" if len(names) == 1 else "no source of the recipe has"
        raise DenyListError(f"deny-list {path} names documents by id, and {which} an `id` in the recipe")
    if is_missing.any():
        missing = [wanted[int(at)].as_py() for at in np.flatnonzero(is_missing)[:SHOWN]]
        raise DenyListError(
            f"deny-list {path}: no document of {', '.join(names)} has {np.count_nonzero(is_missing):,} of the ids, as "
            f"{', '.join(map(repr, missing))}; take these lines out, or index the files that hold them"
        )
    return found
