from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.file_indexes import make_file_index
from torchmix.catalog import file_index
from torchmix.catalog.file_index import file_index_path, load_file_index, remove_file_indexes, save_file_index
from torchmix.errors import CatalogError

IDENTITY, READING = ("data/a.parquet", 123, "abc"), ("input_ids", "none-1")


def saved(tmp_path: Path, source: str = "web") -> Path:
    path = file_index_path(tmp_path, source, IDENTITY, READING)
    save_file_index(path, make_file_index([[3, 1], [2]], seed=5, schema=b"\x00\xff"))
    return path


def test_a_part_is_read_back_whole(tmp_path):
    index, again = make_file_index([[3, 1], [2]], seed=5, schema=b"\x00\xff"), load_file_index(saved(tmp_path))
    assert again is not None
    np.testing.assert_array_equal(again.tokens, index.tokens)
    for (name, a), (_, b) in zip(again.pages.arrays(), index.pages.arrays(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
        assert a.dtype == b.dtype
    assert (again.num_bytes, again.footer_hash, again.schema, again.split_pages) == (
        index.num_bytes,
        index.footer_hash,
        index.schema,
        index.split_pages,
    )


def test_a_part_is_of_one_file_column_and_transform():
    changes = [("b.parquet", 123, "abc"), ("data/a.parquet", 124, "abc"), ("data/a.parquet", 123, "abd")]
    paths = {file_index_path(Path(), "web", identity, READING) for identity in [IDENTITY, *changes]}
    paths |= {
        file_index_path(Path(), "web", IDENTITY, reading) for reading in [("text", "none-1"), ("input_ids", "none-2")]
    }
    assert len(paths | {file_index_path(Path(), "peps", IDENTITY, READING)}) == 7


def test_a_damaged_part_counts_as_none_and_is_logged(tmp_path, caplog):
    path = saved(tmp_path)
    whole = path.read_bytes()
    rng = np.random.default_rng(11)
    for keep in [0, 1, 20, *rng.integers(30, len(whole), 20).tolist()]:
        path.write_bytes(whole[:keep])
        assert load_file_index(path) is None, keep
    assert "is scanned again" in caplog.text
    for place in rng.permutation(len(whole))[:200].tolist():
        content = bytearray(whole)
        content[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
        read = load_file_index(path)
        assert read is None or whole[place] == 0, place  # what aligns arrays is not read
    assert load_file_index(tmp_path / "missing.index") is None


def test_a_part_whose_arrays_disagree_counts_as_none(tmp_path):
    index = make_file_index([[3, 1], [2]])
    save_file_index(tmp_path / "files" / "web.index", replace(index, tokens=index.tokens[:-1]))
    assert load_file_index(tmp_path / "files" / "web.index") is None


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 3, 4, 5, -6]])
def test_lengths_that_cannot_be_are_refused(tokens):
    index = make_file_index([[3, 1], [2]])
    index.check()
    with pytest.raises(CatalogError):
        replace(index, tokens=np.array(tokens, np.int32)).check()


def test_a_part_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"what there was room for")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_index, "write_arrays", full)
    with pytest.raises(OSError, match="No space"):
        saved(tmp_path)
    assert list((tmp_path / "files").iterdir()) == []


def test_parts_of_named_sources_and_unfinished_ones_are_removed_and_no_other_file(tmp_path):
    web, peps = saved(tmp_path, "web"), saved(tmp_path, "peps")
    unfinished, foreign = peps.with_name(peps.name + ".tmp"), web.with_name("notes.txt")
    unfinished.write_bytes(b"")
    foreign.write_bytes(b"")
    remove_file_indexes(tmp_path, None)
    assert {web, peps, foreign} == set(web.parent.iterdir())
    remove_file_indexes(tmp_path, frozenset({"web"}))
    assert {peps, foreign} == set(web.parent.iterdir())
    foreign.unlink()
    remove_file_indexes(tmp_path, frozenset({"peps"}))
    assert not web.parent.exists()
