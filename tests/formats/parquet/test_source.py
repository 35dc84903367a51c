"""The Parquet source page by page, against whole-file reads by pyarrow, over the choices of writers; and bad files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.files import (
    flip_byte,
    make_text_file,
    make_tokens_file,
    random_texts,
    random_tokens,
    write_file,
)
from tests.support.pages import documents_by_page, documents_by_pyarrow, page_runs
from tests.support.split_rows import make_split_file
from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.parquet import scan as parquet_scan
from torchmix.formats.parquet.source import ParquetSource
from torchmix.formats.source import FileScan
from torchmix.storage.random_access import LocalFile

TOKENS = ParquetSource(name="web", column="input_ids", kind="tokens")
TEXT = ParquetSource(name="peps", column="text", kind="text")

LEAF_OF = {"input_ids": "input_ids.list.element", "text": "text"}
ENCODINGS = {"input_ids": ["plain", "dictionary", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"]}
ENCODINGS["text"] = ["plain", "dictionary", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"]


def check_against_pyarrow(source: ParquetSource, path: Path) -> FileScan:
    """Scan a file, and decode it page by page and in runs; all must equal what pyarrow reads. The scan."""
    scan = source.scan(path)
    expected = documents_by_pyarrow(path, source.column)
    assert scan.num_rows == len(expected) == scan.page_rows.sum()
    assert scan.tokens.tolist() == [len(document) for document in expected]
    assert scan.tokens.dtype == np.int32
    assert scan.num_bytes == path.stat().st_size
    assert (scan.page_rows > 0).all()
    assert documents_by_page(source, path, scan) == expected
    assert documents_by_page(source, path, scan, most_pages=5) == expected
    return scan


@pytest.fixture(scope="module")
def documents() -> list[list[int] | None]:
    documents: list[list[int] | None] = [*random_tokens(1, 170)]
    documents[5:150:21] = [None] * len(documents[5:150:21])
    return documents


@pytest.fixture(scope="module")
def texts() -> list[str | None]:
    texts: list[str | None] = [*random_texts(2, 170)]
    texts[5:150:21] = [None] * len(texts[5:150:21])
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
@pytest.mark.parametrize("column", ["input_ids", "text"])
def test_every_way_of_writing_reads_as_pyarrow_reads_it(
    tmp_path: Path, codec: str, column: str, documents: list[list[int] | None], texts: list[str | None]
) -> None:
    make: Callable[..., Path] = make_tokens_file if column == "input_ids" else make_text_file
    rows = documents if column == "input_ids" else texts
    for encoding in ENCODINGS[column]:
        for page_version in ("1.0", "2.0"):
            for page_index in (True, False):
                is_dictionary, is_plain = encoding == "dictionary", encoding == "plain"
                path = make(
                    tmp_path / f"{encoding}-{page_version}-{page_index}.parquet",
                    rows,
                    codec=codec,
                    page_bytes=400,
                    row_group_rows=100,
                    page_version=page_version,
                    page_index=page_index,
                    dictionary=is_dictionary,
                    encoding=None if is_dictionary or is_plain else {LEAF_OF[column]: encoding},
                    checksums=page_index,
                )
                source = TOKENS if column == "input_ids" else TEXT
                scan = check_against_pyarrow(source, path)
                assert len(scan.page_offset) > 6
                assert scan.split_pages == 0 and not scan.tail_bytes.any()
                assert (scan.companion_bytes > 0).all() == is_dictionary


@pytest.mark.parametrize("width", ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"])
def test_integers_of_every_width_keep_it(tmp_path: Path, width: str) -> None:
    type = pa.list_(pa.type_for_alias(width))
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(3, 100, vocabulary=100), type=type)
    run, *_ = page_runs(path, check_against_pyarrow(TOKENS, path))
    assert TOKENS.decode([run])[0].values.dtype == width


@pytest.mark.parametrize("store_schema", [True, False])
@pytest.mark.parametrize("type", [pa.large_list(pa.int32()), pa.list_(pa.field("item", pa.int32(), nullable=False))])
def test_other_lists_read_the_same(tmp_path: Path, type: pa.DataType, store_schema: bool) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(4, 200), type=type, store_schema=store_schema)
    check_against_pyarrow(TOKENS, path)


def test_lists_of_fixed_size_read_the_same_also_where_null(tmp_path: Path) -> None:
    rows: list[list[int] | None] = [[i, i + 1, i + 2] for i in range(300)]
    rows[7] = None
    check_against_pyarrow(TOKENS, make_tokens_file(tmp_path / "a.parquet", rows, type=pa.list_(pa.int32(), 3)))


@pytest.mark.parametrize("type", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_other_strings_read_the_same(tmp_path: Path, type: pa.DataType, texts: list[str | None]) -> None:
    table = pa.table({"text": pa.array(texts).cast(type)})
    check_against_pyarrow(TEXT, write_file(tmp_path / "a.parquet", table, page_bytes=300))


@pytest.mark.parametrize("rows", [[], [None], [[]], [[], None, []], [[5]], [None, [1, 2, 3]]], ids=str)
def test_small_and_empty_files_read_the_same(tmp_path: Path, rows: list[list[int] | None]) -> None:
    for page_index in (True, False):
        check_against_pyarrow(TOKENS, make_tokens_file(tmp_path / "a.parquet", rows, page_index=page_index))


def test_empty_row_groups_keep_the_numbers_of_chunks(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table[:0], table, table[:0], table):
            writer.write_table(part)
    assert check_against_pyarrow(TEXT, tmp_path / "a.parquet").chunk_of_page.tolist() == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("page_version", [1, 2])
@pytest.mark.parametrize("page_values", [1, 7, 64, 333, 5000])
def test_rows_split_over_pages_are_read_by_the_page_in_which_they_begin(
    tmp_path: Path, page_version: int, page_values: int
) -> None:
    documents = [None, *random_tokens(5, 120), [], None]
    path = make_split_file(tmp_path / "a.parquet", documents, page_values=page_values, page_version=page_version)
    scan = check_against_pyarrow(TOKENS, path)
    # Written anew: which rows begin in which of the writer's pages, and where the last of them ends.
    values = [max(1, len(document or [])) for document in documents]
    starts = [sum(values[:row]) for row in range(len(values))]
    page_of_row = [start // page_values for start in starts]
    spans = zip(starts, values, strict=True)
    last_page = {start // page_values: (start + count - 1) // page_values for start, count in spans}
    with_rows = sorted(set(page_of_row))
    assert scan.page_rows.tolist() == [page_of_row.count(page) for page in with_rows]
    num_pages = -(-sum(values) // page_values)
    assert scan.split_pages == num_pages - len({start for start in starts if start % page_values == 0})
    metadata = pq.read_metadata(path).row_group(0).column(0)
    assert scan.page_offset[0] == 4
    assert scan.page_bytes.sum() == metadata.total_compressed_size
    np.testing.assert_array_equal(scan.page_offset[1:], (scan.page_offset + scan.page_bytes)[:-1])
    goes_on = [last_page[page] >= following for page, following in pairwise(with_rows)]
    assert (scan.tail_bytes > 0).tolist() == [*goes_on, False]
    # A tail is one page of the writer, the next in which a row begins.
    for page, (tail, following) in enumerate(zip(scan.tail_bytes[:-1], scan.page_bytes[1:], strict=True)):
        if tail and page + 1 < len(with_rows) - 1 and with_rows[page + 2] - with_rows[page + 1] > 1:
            assert tail < following
        elif tail:
            assert tail <= following


def test_a_row_longer_than_pages_takes_them_all_and_no_more(tmp_path: Path) -> None:
    documents = [[1, 2, 3], list(range(50)), [4], [5] * 9, [6] * 7]
    path = make_split_file(tmp_path / "a.parquet", documents, page_values=10)
    scan = TOKENS.scan(path)
    assert scan.page_rows.tolist() == [2, 2, 1]  # values 0 to 3, 3 to 53; 53, 54 to 63; 63 to 70
    assert scan.split_pages == 6
    _, second, third = scan.page_bytes
    assert scan.tail_bytes.tolist() == [second, third, 0]
    check_against_pyarrow(TOKENS, path)


@pytest.mark.parametrize("page_version", [1, 2])
def test_chunks_whose_pages_happen_to_begin_with_rows_have_no_tails(tmp_path: Path, page_version: int) -> None:
    of_8_values: list[list[list[int] | None]] = [[[5] * 8], [[6] * 4, [7] * 4], [[8] * 7, None], [[], [9] * 7]]
    documents = [document for page in of_8_values for document in page] * 5
    path = make_split_file(tmp_path / "a.parquet", documents, page_values=8, page_version=page_version)
    scan = check_against_pyarrow(TOKENS, path)
    assert scan.split_pages == 0 and scan.tail_bytes is not None and not scan.tail_bytes.any()
    assert scan.page_rows.tolist() == [1, 2, 2, 2] * 5


@pytest.mark.parametrize("page_values", [None, 20])
def test_a_scan_in_small_runs_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_values: int | None
) -> None:
    path, documents = tmp_path / "a.parquet", random_tokens(6, 500)
    if page_values is None:
        make_tokens_file(path, documents, page_bytes=300, page_index=False)
    else:
        make_split_file(path, documents, page_values=page_values)
    whole = TOKENS.scan(path)
    for most_bytes in (1, 1000):
        monkeypatch.setattr(parquet_scan, "SCAN_RUN_BYTES", most_bytes)
        parts = TOKENS.scan(path)
        for name in ("tokens", "page_offset", "page_bytes", "page_rows", "tail_bytes"):
            np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name), name)


def test_the_fingerprint_is_the_one_of_the_scan(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(7, 100))
    scan = TOKENS.scan(path)
    file = LocalFile(path)
    try:
        assert TOKENS.fingerprint(file, str(path)) == (scan.num_bytes, scan.footer_hash)
    finally:
        file.close()


def test_progress_adds_up_to_the_column(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(8, 900))
    seen: list[int] = []
    TOKENS.scan(path, seen.append)
    metadata = pq.read_metadata(path)
    assert seen == [metadata.row_group(g).column(1).total_compressed_size for g in range(metadata.num_row_groups)]


def test_kinds_have_their_own_transforms() -> None:
    assert TOKENS.transform_id != TEXT.transform_id


def test_a_null_token_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    rows: list[list[int | None]] = [[i] for i in range(1000)]
    rows[777] = [1, None, 2]
    path = make_tokens_file(tmp_path / "a.parquet", rows)
    with pytest.raises(SourceUnreadable, match=r"^source 'web': .*a\.parquet: row 777 holds a null"):
        TOKENS.scan(path)


def test_a_missing_file_a_folder_and_text_are_unreadable(tmp_path: Path) -> None:
    with pytest.raises(SourceUnreadable, match=r"^source 'web': .*none\.parquet: cannot be opened: No such file"):
        TOKENS.scan(tmp_path / "none.parquet")
    with pytest.raises(SourceUnreadable, match=r"^source 'web': .*: cannot be read: Is a directory"):
        TOKENS.scan(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 9)
    with pytest.raises(SourceUnreadable, match="not a whole Parquet file"):
        TOKENS.scan(tmp_path / "a.jsonl")


def test_a_file_without_permission_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", [[1]])

    def refuse(path: Path, flags: int) -> int:  # as the system does, though not to root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceUnreadable, match="cannot be opened: Permission denied"):
        TOKENS.scan(path)


def test_a_wrong_column_is_unreadable(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", [[1]])
    with pytest.raises(SourceUnreadable, match=r"^source 'peps': .*a\.parquet: no column 'text'; .*has: id, input_ids"):
        TEXT.scan(path)


@pytest.mark.parametrize("is_footer_plain", [True, False])
def test_an_encrypted_column_is_unreadable(tmp_path: Path, is_footer_plain: bool) -> None:
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class KeysInTheOpen(encryption.KmsClient):
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return key.hex().encode()

    settings = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["text"]}, plaintext_footer=is_footer_plain
    )
    factory = encryption.CryptoFactory(lambda _: KeysInTheOpen())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    table = pa.table({"text": ["secret"]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(SourceUnreadable, match="is encrypted; decrypt"):
        TEXT.scan(tmp_path / "a.parquet")


def test_every_cut_of_a_file_is_unreadable(tmp_path: Path) -> None:
    content = make_tokens_file(tmp_path / "whole.parquet", random_tokens(9, 30), store_schema=False).read_bytes()
    path = tmp_path / "a.parquet"
    for num_bytes in range(0, len(content), 37):
        path.write_bytes(content[:num_bytes])
        with pytest.raises(SourceUnreadable, match="not a whole Parquet file"):
            TOKENS.scan(path)


@pytest.mark.parametrize("dictionary", [False, True])
def test_one_flipped_byte_in_a_page_with_checksums_is_corrupt(tmp_path: Path, dictionary: bool) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(10, 300), checksums=True, dictionary=dictionary)
    scan = TOKENS.scan(path)
    rng = np.random.default_rng(11)
    for offset, num_bytes in zip(scan.page_offset, scan.page_bytes, strict=True):
        place = int(offset + num_bytes - 1 - rng.integers(num_bytes // 2))
        flip_byte(path, place)
        page = rf"the page at bytes \[{offset}, {offset + num_bytes}\)"
        with pytest.raises(CorruptPage, match=rf"^source 'web': .*a\.parquet: {page}"):
            TOKENS.scan(path)
        flip_byte(path, place)
    assert TOKENS.scan(path).footer_hash == scan.footer_hash


def test_damage_that_the_index_hides_from_rows_is_found(tmp_path: Path) -> None:
    """An index that is sound by itself but gives rows to the wrong page is not believed."""
    documents = random_tokens(14, 400, empty=0.0)
    path = make_tokens_file(tmp_path / "a.parquet", documents, codec="none", row_group_rows=400, page_bytes=1024)
    content = path.read_bytes()
    true_scan = TOKENS.scan(path)
    second_row = int(true_scan.page_rows[0])
    assert second_row < 63  # one byte in the index
    metadata = pq.read_metadata(path)
    footer_start = len(content) - 8 - metadata.serialized_size
    index_start = content.index(
        bytes([second_row << 1]), int(true_scan.page_offset[-1] + true_scan.page_bytes[-1]), footer_start
    )
    found_wrong = 0
    for place in range(index_start, footer_start):
        if content[place] == second_row << 1:
            damaged = bytearray(content)
            damaged[place] += 2
            path.write_bytes(damaged)
            scan = TOKENS.scan(path)
            np.testing.assert_array_equal(scan.page_rows, true_scan.page_rows)
            np.testing.assert_array_equal(scan.tokens, true_scan.tokens)
            found_wrong += 1
    assert found_wrong > 0
