"""Columns whose type says more than how they lie: JSON, extension types, maps, lists of no size."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.files import write_file
from tests.support.recipes import make_recipe
from torchmix.indexing.scan import index_recipe
from torchmix.reader.reader import Reader
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT

TEXTS = ['{"a": "ü"}', None, "2", "[]", "{}"] * 60


class Plain(pa.ExtensionType):
    """An extension type around any other."""

    def __init__(self, storage_type: pa.DataType) -> None:
        """Around `storage_type`."""
        super().__init__(storage_type, "torchmix.tests.plain")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Plain:
        return cls(storage_type)


@pytest.fixture
def registered() -> Any:
    """Known to pyarrow, so that it gives arrays of the type."""
    pa.register_extension_type(Plain(pa.string()))
    yield
    pa.unregister_extension_type("torchmix.tests.plain")


def read(path: Path, column: str, kind: str) -> list[list[int]]:
    """Tokens of each row, indexed and then read as by a loader."""
    keys = {"tokens": column} if kind == "tokens" else {"text": column, "tokens": None, "tokenizer": "bytes"}
    filled = write_file(path.parent / "filled.parquet", pa.table({"v": pa.array([[1]]), "t": ["a"]}))
    sources = {
        "s": {"path": path.name, **keys},
        "t": {"path": filled.name, "tokens": "v"},
    }
    catalog = index_recipe(make_recipe({"s": "50%", "t": "50%"}, sources=sources), path.parent)
    reader = Reader(catalog, path.parent, cache_bytes=0)
    try:
        rows = []
        for page in range(catalog.sources["s"].pages.num_pages):
            decoded = reader.page(0, page)
            offsets = np.asarray(decoded.offsets)
            rows += [decoded.values[a:b].tolist() for a, b in pairwise(offsets.tolist())]
        return rows
    finally:
        reader.close()


def as_bytes(texts: list[str | None]) -> list[list[int]]:
    return [[] if text is None else [*text.encode(), END_OF_DOCUMENT] for text in texts]


@pytest.mark.skipif(not hasattr(pa, "json_"), reason="this pyarrow has no type for JSON")
@pytest.mark.parametrize("store_schema", [True, False], ids=["pyarrow's", "as DuckDB's"])
@pytest.mark.parametrize("is_large", [False, True])
def test_11_8_a_column_of_json_is_read_as_text(tmp_path: Path, store_schema: bool, is_large: bool) -> None:
    held = pa.large_string() if is_large else pa.string()
    column = pa.ExtensionArray.from_storage(pa.json_(held), pa.array(TEXTS, held))
    path = write_file(tmp_path / "a.parquet", pa.table({"v": column}), store_schema=store_schema, page_bytes=500)
    assert pq.ParquetFile(path).schema.column(0).logical_type.type == "JSON"
    assert read(path, "v", "text") == as_bytes(TEXTS)
    within = pa.StructArray.from_arrays([column], ["j"])
    path = write_file(tmp_path / "b.parquet", pa.table({"v": within}), store_schema=store_schema)
    assert read(path, "v.j", "text") == as_bytes(TEXTS)


def test_11_8_extension_types_over_strings_and_lists_are_read_as_what_they_hold(
    tmp_path: Path, registered: None
) -> None:
    column = pa.ExtensionArray.from_storage(Plain(pa.string()), pa.array(TEXTS))
    assert read(write_file(tmp_path / "a.parquet", pa.table({"v": column})), "v", "text") == as_bytes(TEXTS)
    lists = pa.array([[1, 2], None, [3]] * 50, pa.list_(pa.int32()))
    column = pa.ExtensionArray.from_storage(Plain(lists.type), lists)
    path = write_file(tmp_path / "b.parquet", pa.table({"v": column}))
    assert read(path, "v", "tokens") == [[1, 2], [], [3]] * 50


@pytest.mark.parametrize("page_index", [True, False])
@pytest.mark.parametrize("key_type", [pa.string(), pa.int64()])
def test_11_8_keys_and_values_of_a_map_are_read_alone(tmp_path: Path, key_type: pa.DataType, page_index: bool) -> None:
    keys: list[Any] = ["a", "b"] if key_type == pa.string() else [5, 6]
    rows = [list(zip(keys, [1, 2], strict=True)), [], None, [(keys[0], 3)]] * 60
    table = pa.table({"v": pa.array(rows, pa.map_(key_type, pa.int32()))})
    path = write_file(tmp_path / "a.parquet", table, page_index=page_index, page_bytes=300)
    assert read(path, "v.value", "tokens") == [[1, 2], [], [], [3]] * 60
    if key_type == pa.int64():
        assert read(path, "v.key", "tokens") == [[5, 6], [], [], [5]] * 60
    nested = [[(key, {"ids": [i, i + 1]}) for i, (key, _) in enumerate(row)] if row else row for row in rows]
    held = pa.map_(key_type, pa.struct([("ids", pa.list_(pa.int32()))]))
    path = write_file(tmp_path / "b.parquet", pa.table({"v": pa.array(nested, held)}), page_index=page_index)
    assert read(path, "v.value.ids", "tokens") == [[0, 1, 1, 2], [], [], [0, 1]] * 60


@pytest.mark.parametrize("page_index", [True, False])
def test_11_8_lists_of_the_fixed_size_0_have_no_tokens(tmp_path: Path, page_index: bool) -> None:
    table = pa.table({"v": pa.array([[], None, []] * 100, pa.list_(pa.int32(), 0)), "w": [1] * 300})
    write_file(tmp_path / "b.parquet", pa.table({"v": pa.array([[1, 2]], pa.list_(pa.int32(), 2))}))
    write_file(tmp_path / "a.parquet", table, page_index=page_index, page_bytes=100)
    path = tmp_path / "[ab].parquet"
    assert read(path, "v", "tokens") == [[]] * 300 + [[1, 2]]
