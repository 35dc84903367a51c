"""Files that are altered after they were indexed, so that they still decode, to other rows of the same lengths.

No decoder can tell: only a checksum of each page with its header, taken by the index, does.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.files import flip_byte, make_tokens_file
from tests.support.json_lines import plain_lines
from tests.support.recipes import make_recipe
from tests.support.split_rows import make_split_file
from torchmix.catalog.store import Catalog
from torchmix.errors import CorruptPage
from torchmix.indexing.scan import index_recipe
from torchmix.reader.reader import Reader

EQUAL_ROWS = np.random.default_rng(1).integers(1000, 2000, (300, 32)).tolist()


def indexed(path: Path, column: str = "input_ids") -> Catalog:
    """The catalog of one file."""
    sources: dict[str, Any] = {"web": {"path": path.name, "tokens": column}}
    return index_recipe(make_recipe({"web": "100%"}, sources=sources), path.parent)


def read_page(catalog: Catalog, directory: Path, page: int) -> list[int]:
    """Tokens of a page, by a reader that has read nothing before."""
    reader = Reader(catalog, directory, cache_bytes=0)
    try:
        return list(np.array(reader.page(0, page).values).tolist())
    finally:
        reader.close()


def swap(path: Path, first: slice, second: slice) -> None:
    """Put two parts of a file of one size into each other's place."""
    content = bytearray(path.read_bytes())
    content[first], content[second] = content[second], content[first]
    path.write_bytes(content)


@pytest.mark.parametrize("checksums", [True, False])
def test_11_1_two_pages_that_changed_places_are_told_with_or_without_the_writers_checksums(
    tmp_path: Path, checksums: bool
) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", EQUAL_ROWS, codec="none", checksums=checksums)
    catalog = indexed(path)
    place = catalog.sources["web"].pages.place(np.arange(3))
    assert place.num_bytes[1] == place.num_bytes[2]
    first, second = (slice(int(a), int(a + n)) for a, n in zip(place.offset[1:], place.num_bytes[1:], strict=True))
    swap(path, first, second)
    assert read_page(catalog, tmp_path, 0)
    for page in (1, 2):
        with pytest.raises(CorruptPage, match=rf"a\.parquet: the page at bytes \[{place.offset[page]}, .* checksum"):
            read_page(catalog, tmp_path, page)


def test_11_1_an_encoding_altered_in_a_header_is_told_where_the_writer_has_a_checksum_of_the_body(
    tmp_path: Path,
) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", EQUAL_ROWS, codec="none", checksums=True)
    catalog = indexed(path)
    offset = int(catalog.sources["web"].pages.place(np.arange(1)).offset[0])
    content = bytearray(path.read_bytes())
    encoding = content.index(b"\x15\x00\x15\x06\x15\x06", offset) + 1
    content[encoding] = 0x12  # BYTE_STREAM_SPLIT: as many integers, of other bytes
    path.write_bytes(content)
    with pytest.raises(CorruptPage, match=r"a\.parquet: the page at bytes .* checksum"):
        read_page(catalog, tmp_path, 0)


def test_11_1_a_dictionary_with_the_writers_checksum_is_compared_with_that_of_the_index(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", EQUAL_ROWS, codec="none", checksums=True, dictionary=True)
    other = make_tokens_file(
        tmp_path / "b.parquet", (np.array(EQUAL_ROWS) + 1).tolist(), codec="none", checksums=True, dictionary=True
    )
    catalog = indexed(path)
    table = catalog.sources["web"].pages
    place = slice(int(table.companion_offset[0]), int(table.companion_offset[0] + table.companion_bytes[0]))
    content = bytearray(path.read_bytes())
    assert content[place] != other.read_bytes()[place]
    content[place] = other.read_bytes()[place]  # whole, with a checksum that is right
    path.write_bytes(content)
    with pytest.raises(CorruptPage, match=rf"the page at bytes \[{place.start}, {place.stop}\) has checksum"):
        read_page(catalog, tmp_path, 0)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_11_1_two_frames_of_one_size_that_changed_places_are_told(tmp_path: Path, suffix: str) -> None:
    parts = [plain_lines(EQUAL_ROWS[i::3] * 4, "input_ids") for i in range(3)]
    frames = [gzip.compress(part, compresslevel=0, mtime=0) for part in parts]
    if suffix == ".zst":  # blocks that are not compressed, of at most 128 KiB; no checksum
        assert max(map(len, parts)) < 1 << 17
        frames = [
            b"\x28\xb5\x2f\xfd\xa0"
            + len(part).to_bytes(4, "little")
            + (len(part) << 3 | 1).to_bytes(3, "little")
            + part
            for part in parts
        ]
    size = len(frames[0])
    assert {len(frame) for frame in frames} == {size}
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join([*frames, *frames]))  # what ends the file is in its fingerprint
    catalog = indexed(path)
    assert catalog.sources["web"].pages.num_pages == 6
    sound = read_page(catalog, tmp_path, 1)
    swap(path, slice(2 * size, 3 * size), slice(3 * size, 4 * size))
    assert read_page(catalog, tmp_path, 1) == sound
    for page in (2, 3):
        with pytest.raises(CorruptPage, match=rf"a\.jsonl\{suffix}: the page at bytes \[{page * size}, .* checksum"):
            read_page(catalog, tmp_path, page)


@pytest.mark.parametrize("page_values", [5, 40])
def test_11_1_every_byte_that_a_page_with_split_rows_is_read_from_has_a_checksum(
    tmp_path: Path, page_values: int
) -> None:
    path = make_split_file(tmp_path / "a.parquet", EQUAL_ROWS[:40], page_values=page_values)
    catalog = indexed(path)
    table = catalog.sources["web"].pages
    place = table.place(np.arange(table.num_pages))
    page = int(np.flatnonzero(place.tail_bytes)[3])
    start, stop = int(place.offset[page]), int(place.offset[page] + place.num_bytes[page])
    tail = int(place.tail_bytes[page])
    assert tail < place.num_bytes[page + 1] or page_values == 40
    sound = read_page(catalog, tmp_path, page)
    for offset in {*range(start, stop + tail, 3), stop - 1, stop, stop + tail - 1}:
        flip_byte(path, offset)
        with pytest.raises(CorruptPage, match=rf"the page at bytes \[{start}, {stop + tail}\) has checksum"):
            read_page(catalog, tmp_path, page)
        flip_byte(path, offset)
    flip_byte(path, stop + tail)
    assert read_page(catalog, tmp_path, page) == sound
