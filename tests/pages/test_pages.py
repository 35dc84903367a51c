"""Pages and rows without a recipe, against whole files read by pyarrow."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer

from tests.support.files import flip_byte, make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.json_lines import plain_lines
from tests.support.processes import ROOT
from tests.support.vocabularies import make_tokenizer
from torchmix.errors import CatalogStale, CorruptPage, LoaderClosed, OptionError, SourceChanged, SourceUnreadable
from torchmix.pages import COMMAND, Pages, open_pages

TOKENS = [*random_tokens(1, 700), None, []]
TEXTS = [*random_texts(2, 500), None, "", "end"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def open_tokens(folder: Path, **options: Any) -> Pages:
    if not (folder / "ids-0.parquet").exists():
        make_tokens_file(folder / "ids-0.parquet", TOKENS[:300])
        make_tokens_file(folder / "ids-1.parquet", TOKENS[300:], page_version="2.0")
    return open_pages("ids-*.parquet", tokens="input_ids", catalog="index", **options)


def test_pages_hold_all_rows_in_order(folder: Path) -> None:
    with open_tokens(folder) as pages:
        assert pages.num_rows == len(TOKENS) and pages.num_pages > 5
        assert pages.lengths.tolist() == [len(row or []) for row in TOKENS]
        rows = []
        for page in range(pages.num_pages):
            found = pages.read_page(page)
            assert isinstance(found, pa.LargeListArray)
            found.validate(full=True)
            start, stop = pages.first_row_of_page[page : page + 2]
            assert len(found) == stop - start
            rows += found.to_pylist()
    assert rows == [row or [] for row in TOKENS]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_plain_text_comes_back_as_strings_and_nulls(folder: Path, suffix: str) -> None:
    if suffix == "parquet":
        make_text_file(folder / "prose.parquet", TEXTS)
    else:
        (folder / "prose.jsonl").write_bytes(plain_lines(TEXTS))
    with open_pages(folder / f"prose.{suffix}", text="text", catalog="index") as pages:
        found = [pages.read_page(page) for page in range(pages.num_pages)]
        for rows in found:
            assert rows.type == pa.large_string()
            rows.validate(full=True)
        assert [text for rows in found for text in rows.to_pylist()] == TEXTS
        asked = np.random.default_rng(1).integers(0, len(TEXTS), 300)
        assert pages.read_rows(asked).to_pylist() == [TEXTS[row] for row in asked]
        assert pages.read_rows([len(TEXTS) - 3]).to_pylist() == [None]


def test_text_with_a_vocabulary_comes_back_as_ids(folder: Path) -> None:
    make_text_file(folder / "prose.parquet", TEXTS)
    library = Tokenizer.from_file(str(make_tokenizer(folder / "t.json")))
    with open_pages("prose.parquet", text="text", tokenizer="t.json", end_id=5, catalog="index") as pages:
        rows = pages.read_rows(np.arange(pages.num_rows)).to_pylist()
    assert rows == [[] if text is None else [*library.encode(text).ids, 5] for text in TEXTS]


def test_rows_come_in_the_order_asked_and_belong_to_the_caller(folder: Path) -> None:
    rng = np.random.default_rng(3)
    with open_tokens(folder, cache=4096) as pages:
        kept = []
        for count in (0, 1, 5, 400):
            asked = rng.integers(0, len(TOKENS), count)
            kept.append((asked, pages.read_rows(asked)))
        assert pages.read_rows(7).to_pylist() == [TOKENS[7]]
        for asked, rows in kept:  # memory of a later call is not theirs
            assert rows.to_pylist() == [TOKENS[row] or [] for row in asked]


def test_values_are_handed_on_without_a_copy(folder: Path) -> None:
    with open_tokens(folder) as pages:
        rows = pages.read_page(2)
        address = rows.values.buffers()[1].address
        assert pages.read_page(2).values.buffers()[1].address == address, "the page that is kept, not a copy of it"
        assert torch.from_dlpack(rows.values).data_ptr() == rows.values.to_numpy().ctypes.data
        assert torch.from_dlpack(rows.values).tolist() == rows.values.to_pylist()
        assert rows.values.to_numpy().ctypes.data == address + rows.values.offset * rows.values.type.bit_width // 8


@pytest.mark.parametrize("method", ["page", "row", "none"])
def test_an_order_gives_every_row_once_and_can_begin_anywhere(folder: Path, method: Any) -> None:
    with open_tokens(folder, window_pages=3) as pages:
        order = pages.permuted_order(seed=4, epoch=2, method=method)
        windows = list(order)
        assert len(windows) == len(order)
        rows = np.concatenate(windows)
        assert np.array_equal(np.sort(rows), np.arange(pages.num_rows))
        assert np.array_equal(rows, np.arange(pages.num_rows)) == (method == "none")
        last = len(order) - 1
        assert np.array_equal(pages.permuted_order(seed=4, epoch=2, method=method)[last], windows[last])
        with pytest.raises(IndexError, match=f"window {len(order)} of an epoch of {len(order)}"):
            order[len(order)]
        other = pages.permuted_order(seed=4, epoch=3, method=method)[0]
        assert np.array_equal(other, windows[0]) == (method == "none")


def test_by_page_each_page_is_decoded_once(folder: Path) -> None:
    with open_tokens(folder, window_pages=3) as pages:
        for rows in pages.permuted_order(seed=4):
            pages.warm(rows)
            for start in range(0, len(rows), 50):
                pages.read_rows(rows[start : start + 50])
        assert pages.stats()["pages_decoded"] == pages.num_pages


def test_what_is_forgotten_makes_room_for_what_comes(folder: Path) -> None:
    with open_tokens(folder, window_pages=2) as pages:
        order = pages.permuted_order(seed=4)
        pages.read_rows(order[0])
        two_windows = 2 * pages.stats()["cache_bytes"]
    with open_tokens(folder, window_pages=2, cache=int(two_windows * 1.3)) as pages:
        for window in range(3):
            pages.warm(order[window + 1])
            pages.read_rows(order[window])
            decoded = pages.stats()["pages_decoded"]
            pages.forget(order[window])
            pages.read_rows(order[window + 1])
            assert pages.stats()["pages_decoded"] == decoded, "all were there"


def test_an_index_is_made_once_and_brought_up_to_date_when_asked(folder: Path) -> None:
    calls: list[tuple[int, int, str, str]] = []

    def progress(*call: Any) -> None:
        calls.append(call)

    first = open_tokens(folder, progress=progress).fingerprint
    assert calls and calls[-1][0] == calls[-1][1]
    calls.clear()
    assert open_tokens(folder, progress=progress).fingerprint == first and not calls
    make_tokens_file(folder / "ids-2.parquet", [[1, 2]])
    assert open_tokens(folder).num_rows == len(TOKENS)
    updated = open_tokens(folder, update=True)
    assert updated.num_rows == len(TOKENS) + 1 and updated.read_rows(len(TOKENS)).to_pylist() == [[1, 2]]
    with pytest.raises(CatalogStale, match=r"update=True"):
        open_tokens(folder, window_pages=1)
    assert open_tokens(folder, window_pages=1, update=True).num_rows == len(TOKENS) + 1


def test_several_names_share_a_folder(folder: Path) -> None:
    make_text_file(folder / "prose.parquet", TEXTS)
    ids = open_tokens(folder, name="ids")
    prose = open_pages("prose.parquet", text="text", catalog="index", name="prose")
    assert ids.read_rows(0).to_pylist() == [TOKENS[0]] and prose.read_rows(0).to_pylist() == [TEXTS[0]]
    assert not np.array_equal(
        ids.permuted_order(seed=1, method="row")[0][:50], prose.permuted_order(seed=1, method="row")[0][:50]
    )


def test_copies_read_on_their_own(folder: Path) -> None:
    pages = open_tokens(folder)
    for other in (copy.copy(pages), pickle.loads(pickle.dumps(pages))):
        assert other.read_rows([3, 1]).to_pylist() == pages.read_rows([3, 1]).to_pylist()
        other.close()
        assert pages.read_page(0).to_pylist()
    make_tokens_file(folder / "ids-2.parquet", [[1, 2]])
    data = pickle.dumps(pages)
    open_tokens(folder, update=True)
    with pytest.raises(CatalogStale, match="open them again"):
        pickle.loads(data)


def test_what_is_wrong_is_named(folder: Path) -> None:
    pages = open_tokens(folder)
    for call in (lambda: pages.read_page(pages.num_pages), lambda: pages.read_page(-1)):
        with pytest.raises(IndexError, match=f"the files have {pages.num_pages}"):
            call()
    for row in (-1, len(TOKENS)):
        with pytest.raises(IndexError, match=f"the files have {len(TOKENS)}"):
            pages.read_rows([0, row])
    pages.close()
    with pytest.raises(LoaderClosed):
        pages.read_page(0)
    with pytest.raises(SourceUnreadable, match="no column 'ids'"):
        open_pages("ids-0.parquet", tokens="ids", catalog="other")
    with pytest.raises(SourceUnreadable, match=r"'idx-\*\.parquet' matches no file"):
        open_pages("idx-*.parquet", tokens="ids", catalog="other")
    make_tokens_file(folder / "ids-0.parquet", TOKENS[:299])
    with pytest.raises(SourceChanged, match=r"ids-0\.parquet"):
        open_tokens(folder).read_page(0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": None}, "exactly one of text and tokens names the column; neither is given"),
        ({"text": "text"}, "exactly one of text and tokens names the column; both are given"),
        ({"tokens": ""}, "tokens: is empty; name a column"),
        ({"tokens": 3}, "tokens: expected text or nothing, got number 3"),
        ({"tokens": None, "text": "text", "tokenizer": "gpt"}, "tokenizer: 'gpt' is no tokenizer"),
        ({"format": "parket"}, r"format: .*did you mean 'parquet'\?"),
        ({"cache": "much"}, "cache: 'much' is not a size"),
        ({"window_pages": 0}, "window_pages: 0 is out of range"),
        ({"window_bytes": "few"}, "window_bytes: 'few' is not a size"),
        ({"name": "a/b"}, "the name 'a/b' is not usable"),
        ({"name": 3}, "name=3 must be text"),
        ({"path": 3}, "path=3 must be a path or a glob"),
        ({"path": []}, "path: is empty"),
        ({"catalog": None}, "catalog=None must be the path of a folder"),
        ({"catalog": ""}, "catalog: is empty"),
        ({"update": "no"}, "update='no' must be True or False"),
        ({"progress": 3}, "progress=3"),
    ],
)
def test_a_wrong_argument_is_named_as_the_call_names_it(folder: Path, wrong: dict[str, Any], message: str) -> None:
    make_tokens_file(folder / "ids.parquet", TOKENS)
    with pytest.raises(OptionError, match=f"^open_pages: {message}") as raised:
        open_pages(**{"path": "ids.parquet", "tokens": "input_ids", "catalog": "index", **wrong})
    assert not re.search(r"sources\.|recipe|torchmix index|shuffle\.|read\.", str(raised.value))


def test_what_to_do_is_said_to_those_who_have_no_recipe(folder: Path) -> None:
    open_tokens(folder)
    with pytest.raises(CatalogStale) as stale:
        open_tokens(folder, window_pages=1)
    make_tokens_file(folder / "ids-0.parquet", TOKENS[:299])
    with pytest.raises(SourceChanged) as changed:
        open_tokens(folder).read_rows([1])
    read, warm = open_tokens(folder), open_tokens(folder)
    (folder / "ids-0.parquet").unlink()
    with pytest.raises(SourceUnreadable) as gone:
        read.read_page(0)
    with pytest.raises(SourceUnreadable) as warmed:
        warm.warm([1])
    for error in (stale, changed, gone, warmed):
        assert "update=True" in str(error.value) and "torchmix index" not in str(error.value)


def test_advice_to_index_has_one_wording_that_open_pages_can_turn_into_its_own() -> None:
    rooms = ("catalog", "transform", "storage", "formats", "indexing", "reader")
    for path in (path for room in rooms for path in (ROOT / "torchmix" / room).rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "torchmix index" in line and not line.lstrip().startswith(("#", '"""')):
                assert "torchmix index" not in COMMAND.sub("", line), f"{path}: {line}"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (2.7, "rows are float64, the first is .*2.7"),
        ([1, 2.0], "rows are float64"),
        (["1"], "rows are <U1"),
        ([None, 1], "rows are object"),
        ([[1, 2], [3, 4]], r"rows have the shape \(2, 2\); give one axis"),
        ([[1], [2, 3]], "rows: "),
        ([True, False], r"rows are a mask of the shape \(2,\); a mask has one bool for each of the 702 rows"),
        (True, r"rows are a mask of the shape \(\)"),
    ],
)
def test_rows_that_are_no_rows_are_refused(folder: Path, rows: Any, message: str) -> None:
    with open_tokens(folder) as pages:
        for call in (pages.read_rows, pages.warm, pages.forget):
            with pytest.raises(OptionError, match=f"^{message}"):
                call(rows)


def test_rows_come_as_any_whole_numbers_or_as_a_mask(folder: Path) -> None:
    asked = [3, 1, 3]
    mask = np.zeros(len(TOKENS), np.bool_)
    mask[asked] = True
    with open_tokens(folder) as pages:
        for rows in (asked, tuple(asked), np.array(asked, np.uint8), torch.tensor(asked), pa.array(asked)):
            assert pages.read_rows(rows).to_pylist() == [TOKENS[row] for row in asked]
        for as_given in (mask, mask.tolist(), torch.from_numpy(mask)):
            assert pages.read_rows(as_given).to_pylist() == [TOKENS[1], TOKENS[3]]
        assert len(pages.read_rows([])) == len(pages.read_rows(~np.ones(len(TOKENS), np.bool_))) == 0
        for row in (len(TOKENS), -1, 2**63, 2**70, -(2**70)):
            with pytest.raises(IndexError, match=f"^row {row}: the files have {len(TOKENS)} rows"):
                pages.read_rows([row])
        assert pages.read_page(np.int64(1)).to_pylist() == pages.read_page(1).to_pylist()
        for page in (1.0, True, "1", None):
            with pytest.raises(OptionError, match="read_page: page="):
                pages.read_page(page)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "x"}, "method='x' is not one of page, row, none"),
        ({"method": None}, "method=None"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"epoch": -1}, "epoch=-1"),
        ({"epoch": None}, "epoch=None"),
    ],
)
def test_an_order_of_nothing_known_is_refused(folder: Path, wrong: dict[str, Any], message: str) -> None:
    with open_tokens(folder) as pages:
        with pytest.raises(OptionError, match=f"^permuted_order: {message}"):
            pages.permuted_order(**{"seed": 1, **wrong})
        largest = pages.permuted_order(seed=np.uint64(2**63 - 1), epoch=np.int32(1))
        assert np.array_equal(largest[0], pages.permuted_order(seed=2**63 - 1, epoch=1)[0])
        with pytest.raises(OptionError, match=r"window=0\.5"):
            largest[0.5]  # type: ignore[index]


def test_a_damaged_page_is_named(folder: Path) -> None:
    make_tokens_file(folder / "ids.parquet", TOKENS[:300], checksums=True)
    pages = open_pages("ids.parquet", tokens="input_ids", catalog="index")
    flip_byte(folder / "ids.parquet", int(pages._source.pages.place(np.array([1])).offset[0]) + 60)
    pages.read_page(0)
    with pytest.raises(CorruptPage, match=r"ids\.parquet"):
        pages.read_page(1)


def test_files_without_rows_are_opened(tmp_path):
    make_tokens_file(tmp_path / "a.parquet", [])
    make_tokens_file(tmp_path / "b.parquet", [[1, 2], [3]])
    with open_pages(tmp_path / "*.parquet", catalog=tmp_path / "both", tokens="input_ids") as pages:
        assert pages.num_rows == 2 and pages.read_rows([1, 0]).to_pylist() == [[3], [1, 2]]
        assert sorted(row for rows in pages.permuted_order(seed=1) for row in rows) == [0, 1]
    with open_pages(tmp_path / "a.parquet", catalog=tmp_path / "none", tokens="input_ids") as pages:
        assert (pages.num_rows, pages.num_pages) == (0, 0) and len(pages.lengths) == 0
        assert pages.read_rows([]).to_pylist() == []
        for method in ("page", "row", "none"):
            assert [len(rows) for rows in pages.permuted_order(seed=1, method=method)] == [0]
        for epochs in (1, None):  # without end there is nothing to wait for
            assert list(pages.batches(rows=4, seed=1, epochs=epochs)) == []
        with pytest.raises(IndexError):
            pages.read_page(0)
