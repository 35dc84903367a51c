"""Parquet files that are altered, before they are indexed or after: what is read is what was indexed, or an error says
where.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.files import flip_byte, make_text_file, make_tokens_file, random_tokens
from tests.support.pages import documents_by_page, documents_by_pyarrow
from tests.support.recipes import make_recipe
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogError, CorruptPage, SourceChanged, SourceUnreadable
from torchmix.formats.parquet.source import ParquetSource
from torchmix.indexing.scan import index_recipe
from torchmix.reader.reader import Reader

FILES = sorted((Path(__file__).parents[1] / "files").glob("*.parquet"))
OFFSETS = 60
TOKENS = ParquetSource(name="web", column="input_ids", kind="tokens")


def read_all(catalog: Catalog, directory: Path) -> list[np.ndarray]:
    """Tokens of every page, in order."""
    reader = Reader(catalog, directory, cache_bytes=0)
    try:
        return [np.array(reader.page(0, page).values) for page in range(catalog.sources["s"].pages.num_pages)]
    finally:
        reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_byte_altered_in_any_region_is_told_with_file_and_place_or_does_not_matter(tmp_path: Path, path: Path):
    held = tmp_path / path.name
    shutil.copy(path, held)
    text = {"tokens": None, "text": "text", "tokenizer": "bytes"}
    column = text if path.stem == "fastparquet" else {"tokens": "ids"}
    recipe = make_recipe({"s": "100%"}, sources={"s": {"path": path.name, **column}})
    catalog = index_recipe(recipe, tmp_path)
    good = read_all(catalog, tmp_path)
    place = catalog.sources["s"].pages.place(np.arange(len(good)))
    in_pages = np.concatenate(
        [np.linspace(a, a + n - 1, 12).astype(int) for a, n in zip(place.offset, place.num_bytes, strict=True)]
    )
    size, told = held.stat().st_size, 0
    for offset in {
        *np.linspace(0, size - 1, OFFSETS).astype(int).tolist(),
        *in_pages[:: len(in_pages) // 60 + 1].tolist(),
    }:
        flip_byte(held, offset)
        try:
            for read, wanted in zip(read_all(catalog, tmp_path), good, strict=True):
                np.testing.assert_array_equal(read, wanted, err_msg=f"byte {offset}")
            assert offset not in in_pages, "every byte of a page is checked"
        except (CorruptPage, SourceChanged) as error:
            assert str(held) in str(error)
            told += 1
        flip_byte(held, offset)
    assert told > 10
    for kept in (0, 4, size // 2, size - 1):
        held.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(CatalogError, match=str(held)):
            read_all(catalog, tmp_path)


@pytest.mark.slow
def test_a_damaged_byte_anywhere_reads_or_is_a_named_error(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(12, 60), page_bytes=256, store_schema=False)
    rng = np.random.default_rng(13)
    content = path.read_bytes()
    outcomes = set()
    for place in rng.permutation(len(content))[:200]:
        damaged = bytearray(content)
        damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            documents_by_page(TOKENS, path, TOKENS.scan(path))
            outcomes.add("read")
        except (SourceUnreadable, CorruptPage) as error:
            assert str(error).startswith(f"source 'web': {path}: ")
            outcomes.add(type(error).__name__)
    assert outcomes == {"read", "SourceUnreadable", "CorruptPage"}


def test_pages_that_do_not_lie_where_the_page_index_says_are_found_by_their_headers(tmp_path: Path) -> None:
    """Two neighbours of different sizes and of as many rows have changed places: together they still decode."""
    texts = [*["a"] * 16, *["much longer"] * 16, "b"]
    path = make_text_file(tmp_path / "a.parquet", texts, codec="none", page_bytes=1, row_group_rows=1000)
    source = ParquetSource(name="web", column="text", kind="text")
    scan = source.scan(path)
    assert scan.page_rows.tolist() == [16, 16, 1]
    a, b, c = (int(offset) for offset in scan.page_offset)
    assert b - a != c - b
    content = path.read_bytes()
    path.write_bytes(content[:a] + content[b:c] + content[a:b] + content[c:])
    scan = source.scan(path)
    assert scan.page_offset.tolist() == [a, a + c - b, c]
    assert documents_by_page(source, path, scan) == documents_by_pyarrow(path, "text")
    assert scan.tokens.tolist() == [12] * 16 + [2] * 17
