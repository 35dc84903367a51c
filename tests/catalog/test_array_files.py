from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.process_table import open_descriptors
from torchmix.catalog.array_files import SMALL_BYTES, ArrayWriter, check_content, open_arrays, write_arrays
from torchmix.errors import CatalogError

ARRAYS = {
    "rows": [np.arange(5), np.arange(0), np.arange(100, 1000)],
    "kind": [np.array([3, 1, 2], np.int8)],
    "none": [np.zeros(0, np.int8)],
    "tokens": [np.arange(7, dtype=np.int32)],
}


def test_parts_are_read_back_as_one_read_only_array_each_that_numpy_alone_reads_too(tmp_path):
    path = tmp_path / "a"
    entries = write_arrays(path, ARRAYS)
    opened = open_arrays(path, entries)
    assert list(opened) == list(ARRAYS)
    for name, array in opened.items():
        assert array.tolist() == np.concatenate(ARRAYS[name]).tolist() and array.dtype == ARRAYS[name][0].dtype
        assert type(array) is np.ndarray and array.flags.aligned
        with path.open("rb") as file:
            file.seek(entries[name].offset)
            assert np.load(file).tolist() == array.tolist()
    with pytest.raises(ValueError, match="read-only"):
        opened["rows"][0] = 1
    check_content(path, entries)


def test_a_large_file_is_mapped_and_keeps_no_descriptor(tmp_path):
    values = np.arange(SMALL_BYTES)
    entries = write_arrays(tmp_path / "a", {"few": [np.arange(3)], "many": [values]})
    before = open_descriptors()
    opened = open_arrays(tmp_path / "a", entries)
    assert open_descriptors() <= before
    assert np.array_equal(opened["many"], values) and opened["few"].tolist() == [0, 1, 2]
    assert str(tmp_path / "a") in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match="read-only"):
        opened["many"][0] = 1


@pytest.mark.parametrize("keep_bytes", [0, 5, 64, 128, 1000, -1])
def test_a_truncated_file_is_an_error_that_names_the_remedy(tmp_path, keep_bytes):
    path = tmp_path / "a"
    entries = write_arrays(path, ARRAYS)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(CatalogError, match=r"/a has .* bytes.*run torchmix index"):
        open_arrays(path, entries)


def test_a_missing_file_is_an_error_that_names_the_remedy(tmp_path):
    entries = write_arrays(tmp_path / "a", ARRAYS)
    with pytest.raises(CatalogError, match="is missing; run torchmix index"):
        open_arrays(tmp_path / "b", entries)


def test_a_file_of_another_type_but_the_same_size_is_refused(tmp_path):
    entries = write_arrays(tmp_path / "a", {"rows": [np.arange(10)]})
    write_arrays(tmp_path / "b", {"rows": [np.arange(10.0)]})
    with pytest.raises(CatalogError, match=r"does not hold rows as an array of <i8 \[10\]"):
        open_arrays(tmp_path / "b", entries)


@pytest.mark.parametrize("offset", [3, 127, 128, 4000, -1])
def test_one_flipped_bit_anywhere_fails_the_checksum(tmp_path, offset):
    path = tmp_path / "a"
    entries = write_arrays(path, ARRAYS)
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)
    with pytest.raises(CatalogError, match="checksum"):
        check_content(path, entries)


def test_headers_of_garbage_are_an_error_and_no_crash(tmp_path):
    path = tmp_path / "a"
    entries = write_arrays(path, ARRAYS)
    path.write_bytes(b"\x93NUMPY\x01\x00" + bytes(path.stat().st_size - 8))
    with pytest.raises(CatalogError, match="does not hold rows as an array"):
        open_arrays(path, entries)


def test_many_threads_may_open_arrays_at_once(tmp_path):
    entries = [write_arrays(tmp_path / str(i), {"a": [np.arange(i)]}) for i in range(20)]

    def open_all(_: int) -> list[int]:
        return [len(open_arrays(tmp_path / str(i), entry)["a"]) for i, entry in enumerate(entries)]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(open_all, range(200))) == [list(range(20))] * 200


def test_arrays_that_were_added_to_one_file_are_opened_from_it_together_or_alone(tmp_path):
    writer = ArrayWriter(tmp_path / "a")
    entries = [writer.add(ARRAYS), writer.add({"rows": [np.arange(9)]}), writer.add(ARRAYS)]
    writer.close()
    opened: dict = {}
    for of_source in entries:
        check_content(tmp_path / "a", of_source)
        together, alone = open_arrays(tmp_path / "a", of_source, opened), open_arrays(tmp_path / "a", of_source)
        for name, array in alone.items():
            assert np.array_equal(together[name], array) and array.flags.aligned
    assert alone["rows"].tolist() == np.concatenate(ARRAYS["rows"]).tolist()
    assert list(opened) == [tmp_path / "a"]


def test_a_file_is_opened_once_for_all_who_share_it(tmp_path):
    entries = write_arrays(tmp_path / "a", ARRAYS)
    opened: dict = {}
    open_arrays(tmp_path / "a", entries, opened)
    (tmp_path / "a").unlink()
    assert open_arrays(tmp_path / "a", entries, opened)["tokens"].tolist() == list(range(7))


def test_a_file_that_ends_within_a_later_source_still_opens_for_the_earlier_ones(tmp_path):
    writer = ArrayWriter(tmp_path / "a")
    first, last = writer.add(ARRAYS), writer.add(ARRAYS)
    writer.close()
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    assert open_arrays(tmp_path / "a", first)["tokens"].tolist() == list(range(7))
    with pytest.raises(CatalogError, match=r"/a has .* bytes, its manifest says at least .*run torchmix index"):
        open_arrays(tmp_path / "a", last)
