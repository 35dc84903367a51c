"""Runs of pages through the one-page file in memory: sound ones, damaged ones, and what the errors name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.pages import page_runs
from tests.support.split_rows import make_split_file
from torchmix.errors import CorruptPage
from torchmix.formats.parquet.page import decode_pages, decode_parts_of_rows, read_headers
from torchmix.formats.parquet.source import ParquetSource
from torchmix.formats.source import PageRun

TOKENS = ParquetSource(name="web", column="input_ids", kind="tokens")
TEXT = ParquetSource(name="peps", column="text", kind="text")


def flipped(run: PageRun, place: int) -> PageRun:
    pages = bytearray(run.pages)
    pages[place] ^= 0xFF
    return replace(run, pages=bytes(pages))


def test_rows_of_a_page_are_those_of_the_file(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(1, 900), dictionary=True)
    whole = pq.read_table(path).column("input_ids")
    for run in page_runs(path, TOKENS.scan(path)):
        [array] = decode_pages(run)
        assert array.type == pa.list_(pa.int32())
        assert array.to_pylist() == whole[run.first_row : run.first_row + run.num_rows].to_pylist()


def test_bytes_may_come_as_memoryviews(tmp_path: Path) -> None:
    path = make_text_file(tmp_path / "a.parquet", random_texts(2, 300), dictionary=True, checksums=True)
    for run in page_runs(path, TEXT.scan(path), most_pages=3):
        views = replace(run, pages=memoryview(run.pages), companion=memoryview(run.companion))
        assert decode_pages(views) == decode_pages(run)


@pytest.mark.parametrize("begins_inside_row", [False, True])
def test_parts_of_rows_are_all_that_the_pages_hold(tmp_path: Path, begins_inside_row: bool) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(3, 300), row_group_rows=300)
    [run] = page_runs(path, TOKENS.scan(path), most_pages=1000)
    [array] = decode_parts_of_rows(replace(run, num_rows=0, begins_inside_row=begins_inside_row))
    rows = decode_pages(run)[0].to_pylist()
    assert array.to_pylist() == ([[0], *rows] if begins_inside_row else rows)


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_the_opening_page_is_of_any_codec_and_dropped(tmp_path: Path, codec: str, dictionary: bool) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(3, 300), codec=codec, dictionary=dictionary)
    for run in page_runs(path, TOKENS.scan(path), most_pages=2):
        again = decode_pages(replace(run, begins_inside_row=True))
        assert [row for array in again for row in array.to_pylist()] == decode_pages(run)[0].to_pylist()


@pytest.mark.parametrize("codec", ["none", "zstd", "snappy"])
@pytest.mark.parametrize("page_version", ["1.0", "2.0"])
def test_one_flipped_byte_is_found_by_the_checksum_and_the_page_named(
    tmp_path: Path, codec: str, page_version: str
) -> None:
    path = make_tokens_file(
        tmp_path / "a.parquet",
        random_tokens(4, 300),
        codec=codec,
        page_version=page_version,
        checksums=True,
        row_group_rows=300,
    )
    [run] = page_runs(path, TOKENS.scan(path), most_pages=1000)
    headers = read_headers(run)
    assert len(headers) > 4
    start = 0
    rng = np.random.default_rng(5)
    for header in headers:
        place = int(rng.integers(header.body, header.stop))
        named = rf"^the page at bytes \[{run.offset + start}, {run.offset + header.stop}\), within rows \[0, 300\)"
        with pytest.raises(CorruptPage, match=named):
            decode_pages(flipped(run, place))
        with pytest.raises(CorruptPage, match=named):
            decode_parts_of_rows(flipped(run, place))
        start = header.stop


def test_a_damaged_dictionary_is_named(tmp_path: Path) -> None:
    path = make_text_file(tmp_path / "a.parquet", random_texts(5, 300), dictionary=True, checksums=True)
    run = next(page_runs(path, TEXT.scan(path)))
    for place in (0, len(run.companion) // 2, len(run.companion) - 1):
        dictionary = bytearray(run.companion)
        dictionary[place] ^= 0xFF
        with pytest.raises(CorruptPage, match=r"^the dictionary page"):
            decode_pages(replace(run, companion=bytes(dictionary)))


def test_a_damaged_page_is_found_also_where_rows_span_pages(tmp_path: Path) -> None:
    path = make_split_file(tmp_path / "a.parquet", random_tokens(6, 60), page_values=50)
    [run] = page_runs(path, TOKENS.scan(path), most_pages=1000)
    headers = read_headers(run)
    start, stop = headers[4].stop, headers[5].stop
    named = rf"the page at bytes \[{run.offset + start}, {run.offset + stop}\)"
    with pytest.raises(CorruptPage, match=named):
        decode_pages(flipped(run, headers[5].body))  # the size of its levels


@pytest.mark.parametrize("lost_bytes", [1, 50])
def test_a_page_cut_short_is_refused(tmp_path: Path, lost_bytes: int) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(7, 300))
    run = next(page_runs(path, TOKENS.scan(path), most_pages=3))
    with pytest.raises(CorruptPage, match=rf"no whole page at byte \d+, in the run of pages at bytes \[{run.offset}, "):
        decode_pages(replace(run, pages=run.pages[:-lost_bytes]))


def test_another_number_of_rows_than_planned_is_refused(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(8, 300))
    run = next(page_runs(path, TOKENS.scan(path)))
    with pytest.raises(CorruptPage, match=rf"hold {run.num_rows} rows, not {run.num_rows + 1} "):
        decode_pages(replace(run, num_rows=run.num_rows + 1))


def test_pages_of_another_codec_are_refused(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(9, 300), codec="zstd")
    run = next(page_runs(path, TOKENS.scan(path)))
    for codec in (0, 1, 2, 3, 4, 7, 99):
        with pytest.raises(CorruptPage):
            decode_pages(replace(run, kind=codec))
