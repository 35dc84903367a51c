"""Megatron's files against the frozen vectors of docs/vectors.json: the code, and the second implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.book_pages import indexed_footer_hash, indexed_pages
from tests.support.indexed_datasets import write_dataset
from torchmix.formats.megatron.source import IndexedSource
from torchmix.storage.random_access import LocalFile

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "vectors.json").read_text(encoding="utf-8"))
SOURCE = IndexedSource(name="web")


@pytest.mark.parametrize("vector", VECTORS["indexed_pages"])
def test_pages(vector: dict[str, Any], tmp_path: Path) -> None:
    starts, tokens, token_bytes = vector["starts"], vector["tokens"], vector["token_bytes"]
    assert indexed_pages(starts, tokens, token_bytes) == vector["pages"]
    dtype = {1: "uint8", 2: "uint16", 4: "int32"}[token_bytes]
    size = max(start + count * token_bytes for start, count in zip(starts, tokens, strict=True))
    documents = [np.zeros(count, dtype) for count in tokens]
    path = write_dataset(tmp_path / "web", documents, dtype=dtype, pointers=starts, content=bytes(size))
    scan = SOURCE.scan(path)
    assert np.stack([scan.page_offset, scan.page_bytes, scan.page_rows], 1).tolist() == vector["pages"]


@pytest.mark.parametrize("vector", VECTORS["indexed_footer_hash"]["hashes"])
def test_footer_hashes(vector: dict[str, Any], tmp_path: Path) -> None:
    bin_content = bytes((i * i + i // 7) % 256 for i in range(vector["bin_bytes"]))
    idx_content = bytes((3 * i + i // 5) % 256 for i in range(vector["idx_bytes"]))
    assert indexed_footer_hash(bin_content, idx_content) == vector["hash"]
    path = tmp_path / "web.bin"
    path.write_bytes(bin_content)
    path.with_suffix(".idx").write_bytes(idx_content)
    file = LocalFile(path)
    try:
        assert SOURCE.fingerprint(file, str(path)) == (vector["bin_bytes"], vector["hash"])
    finally:
        file.close()
