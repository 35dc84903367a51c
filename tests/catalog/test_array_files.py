from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from torchmix.catalog.array_files import SMALL_BYTES, check_content, open_array, write_array
from torchmix.errors import CatalogError

PARTS = [np.arange(5), np.arange(0), np.arange(100, 1000)]


def test_parts_are_read_back_as_one_read_only_array_that_numpy_alone_reads_too(tmp_path):
    entry = write_array(tmp_path / "a.npy", PARTS)
    array = open_array(tmp_path / "a.npy", entry)
    assert array.tolist() == np.concatenate(PARTS).tolist() == np.load(tmp_path / "a.npy").tolist()
    assert array.dtype == np.int64 and type(array) is np.ndarray
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    check_content(tmp_path / "a.npy", entry)


def test_a_large_array_is_mapped_and_keeps_no_descriptor(tmp_path):
    values = np.arange(SMALL_BYTES)
    entry = write_array(tmp_path / "a.npy", [values])
    before = len(list(Path("/proc/self/fd").iterdir()))
    array = open_array(tmp_path / "a.npy", entry)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert np.array_equal(array, values) and type(array) is np.ndarray
    assert str(tmp_path / "a.npy") in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_an_array_of_no_entries_is_read_back(tmp_path):
    entry = write_array(tmp_path / "a.npy", [np.zeros(0, np.int8)])
    assert open_array(tmp_path / "a.npy", entry).shape == (0,)


@pytest.mark.parametrize("keep_bytes", [0, 5, 64, 128, 1000, -1])
def test_a_truncated_file_is_an_error_that_names_the_remedy(tmp_path, keep_bytes):
    path = tmp_path / "a.npy"
    entry = write_array(path, PARTS)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(CatalogError, match=r"a\.npy has .* bytes.*run torchmix index"):
        open_array(path, entry)


def test_a_missing_file_is_an_error_that_names_the_remedy(tmp_path):
    entry = write_array(tmp_path / "a.npy", PARTS)
    with pytest.raises(CatalogError, match="is missing; run torchmix index"):
        open_array(tmp_path / "b.npy", entry)


def test_a_file_of_another_type_but_the_same_size_is_refused(tmp_path):
    entry = write_array(tmp_path / "a.npy", [np.arange(10)])
    write_array(tmp_path / "b.npy", [np.arange(10.0)])
    with pytest.raises(CatalogError, match=r"does not begin as an array of <i8 \[10\]"):
        open_array(tmp_path / "b.npy", entry)


@pytest.mark.parametrize("offset", [3, 127, 128, 4000, -1])
def test_one_flipped_bit_anywhere_fails_the_checksum(tmp_path, offset):
    path = tmp_path / "a.npy"
    entry = write_array(path, PARTS)
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)
    with pytest.raises(CatalogError, match="checksum"):
        check_content(path, entry)


def test_a_header_of_garbage_is_an_error_and_no_crash(tmp_path):
    path = tmp_path / "a.npy"
    entry = write_array(path, PARTS)
    path.write_bytes(b"\x93NUMPY\x01\x00" + bytes(entry.num_bytes - 8))
    with pytest.raises(CatalogError, match="does not begin as an array"):
        open_array(path, entry)


def test_many_threads_may_open_arrays_at_once(tmp_path):
    entries = [write_array(tmp_path / f"{i}.npy", [np.arange(i)]) for i in range(20)]

    def open_all(_: int) -> list[int]:
        return [len(open_array(tmp_path / f"{i}.npy", entry)) for i, entry in enumerate(entries)]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(open_all, range(200))) == [list(range(20))] * 200
