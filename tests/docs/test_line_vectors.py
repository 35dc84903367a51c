"""Files of JSON lines and of Arrow against the frozen vectors of docs/vectors.json: the code, and the second
implementation."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.arrow_files import write_arrow
from tests.support.book_pages import ends_hash, line_pages, row_pages
from torchmix.formats.arrow.source import ArrowSource
from torchmix.formats.jsonl.lines import GZIP
from torchmix.formats.jsonl.source import JsonLinesSource
from torchmix.storage.random_access import LocalFile

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "vectors.json").read_text(encoding="utf-8"))


def line(size: int) -> bytes:
    """A line of so many bytes, blank if they are negative."""
    return b" " * (-size - 1) + b"\n" if size < 0 else b'{"v":"' + b"x" * (size - 9) + b'"}\n'


@pytest.mark.parametrize("vector", VECTORS["line_pages"])
def test_pages_of_lines(vector: dict[str, Any], tmp_path: Path) -> None:
    assert line_pages(vector["lines"], vector["frames"]) == vector["pages"]
    content = b"".join(map(line, vector["lines"]))
    source = JsonLinesSource(name="web", column="v", kind="text")
    if vector["frames"] is None:
        (tmp_path / "x.jsonl").write_bytes(content)
        scan = source.scan(tmp_path / "x.jsonl")
        found = zip(scan.page_offset.tolist(), scan.page_bytes.tolist(), scan.page_rows.tolist(), strict=True)
        assert [list(page) for page in found] == vector["pages"]
        return
    frames, place = [], 0
    for size in vector["frames"]:
        frames.append(gzip.compress(content[place : place + size], mtime=0))
        place += size
    assert place == len(content)
    (tmp_path / "x.jsonl.gz").write_bytes(b"".join(frames))
    scan = source.scan(tmp_path / "x.jsonl.gz")
    ends = [sum(map(len, frames[:i])) for i in range(len(frames) + 1)]
    first = [ends.index(offset) for offset in scan.page_offset.tolist()]
    stop = [ends.index(end) for end in (scan.page_offset + scan.page_bytes).tolist()]
    flags = (scan.kind[scan.chunk_of_page] - GZIP).tolist()
    found = zip(first, stop, scan.page_rows.tolist(), flags, strict=True)
    assert [[start, end - start, rows, flag] for start, end, rows, flag in found] == vector["pages"]


@pytest.mark.parametrize("vector", VECTORS["row_pages"])
def test_pages_of_rows(vector: dict[str, Any], tmp_path: Path) -> None:
    assert row_pages(vector["rows"]) == vector["pages"]
    texts = pa.table({"v": ["x" * size for size in vector["rows"]]})
    path = write_arrow(tmp_path / "x.arrow", texts, batch_rows=1000)
    scan = ArrowSource(name="web", column="v", kind="text").scan(path)
    assert scan.page_rows.tolist() == vector["pages"] and set(scan.kind.tolist()) == {0}


@pytest.mark.parametrize("vector", VECTORS["ends_hash"]["hashes"])
def test_hashes_of_ends(vector: dict[str, Any], tmp_path: Path) -> None:
    content = bytes((i * i + i // 7) % 256 for i in range(vector["bytes"]))
    assert ends_hash(content) == vector["hash"]
    (tmp_path / "x").write_bytes(content)
    file = LocalFile(tmp_path / "x")
    for source in (JsonLinesSource, ArrowSource):
        own = source(name="web", column="v", kind="text")
        assert own.fingerprint(file, "x") == (vector["bytes"], vector["hash"])
    file.close()
