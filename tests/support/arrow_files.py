"""Arrow files for tests: a table in, a file or a stream out, with each of the writer's choices that alters pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa


def write_arrow(
    path: Path, table: pa.Table, *, stream: bool = False, codec: str | None = None, batch_rows: int = 1000
) -> Path:
    """Write a table to `path`, with its folder, in batches of at most `batch_rows`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = pa.ipc.IpcWriteOptions(compression=codec, unify_dictionaries=not stream)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema, options=options) as writer:
        for batch in table.to_batches(max_chunksize=batch_rows):
            writer.write_batch(batch)
    return path


def among_others(array: pa.Array, seed: int = 0, name: str = "v") -> pa.Table:
    """A table with a column among others of every kind of layout, at a random place."""
    rng, rows = random.Random(seed), range(len(array))
    columns: list[tuple[str, Any]] = [
        ("number", pa.array(rows, pa.int64())),
        ("view", pa.array(["z" * (i % 40) for i in rows], pa.string_view())),
        (
            "struct",
            pa.array(
                [{"x": i, "y": ["q"] * (i % 3)} for i in rows],
                pa.struct([("x", pa.int16()), ("y", pa.list_(pa.string()))]),
            ),
        ),
        ("dictionary", pa.array([str(i % 3) for i in rows], pa.string()).dictionary_encode()),
        ("nothing", pa.nulls(len(array))),
        ("union", pa.UnionArray.from_sparse(pa.array([0] * len(array), pa.int8()), [pa.array(rows, pa.int64())])),
        ("flag", pa.array([None if i % 5 == 0 else i % 2 == 0 for i in rows], pa.bool_())),
    ]
    rng.shuffle(columns)
    columns.insert(rng.randint(0, len(columns)), (name, array))
    return pa.table(dict(columns))


def token_dictionary(documents: Sequence[Sequence[int] | None]) -> pa.Array:
    """Documents as lists of a dictionary's integers."""
    flat = pa.array([token for document in documents for token in document or ()], pa.int32()).dictionary_encode()
    ends, offsets = 0, [0]
    for document in documents:
        ends += len(document or ())
        offsets.append(ends)
    mask = pa.array([document is None for document in documents], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=mask)
