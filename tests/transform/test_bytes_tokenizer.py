"""The bytes tokenizer against Python's own encoding, one document at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.support.files import random_texts
from torchmix.transform import bytes_tokenizer


def expected(texts: Sequence[str | None]) -> list[list[int]]:
    return [[] if text is None else [*text.encode(), bytes_tokenizer.END_OF_DOCUMENT] for text in texts]


def documents(array: pa.Array) -> list[list[int]]:
    ids, offsets = bytes_tokenizer.tokenize(array)
    assert ids.dtype == np.uint16
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    np.testing.assert_array_equal(np.diff(offsets), bytes_tokenizer.count_tokens(array))
    return [part.tolist() for part in np.split(ids, offsets[1:-1])][: len(array)]


@pytest.mark.parametrize("type", [pa.string(), pa.large_string()])
@pytest.mark.parametrize(
    "texts",
    [
        [],
        [""],
        [None],
        ["", None, ""],
        ["a", "", None, "日本語", "🙂"],
        [None, "x"],
        ["x", None],
    ],
)
def test_each_document_is_its_bytes_and_an_end(texts: list[str | None], type: pa.DataType) -> None:
    assert documents(pa.array(texts, type)) == expected(texts)


def test_many_random_documents_equal_python() -> None:
    texts: list[str | None] = [*random_texts(seed=5, num_documents=2000)]
    texts[::17] = [None] * len(texts[::17])
    assert documents(pa.array(texts)) == expected(texts)


@pytest.mark.parametrize("texts", [["ab", None, "", "cde", "f"], ["ab", "é", "", "cde", "f"]])
def test_a_slice_gives_only_its_own_documents(texts: list[str | None]) -> None:
    for start in range(len(texts)):
        for stop in range(start, len(texts) + 1):
            assert documents(pa.array(texts)[start:stop]) == expected(texts[start:stop])


def test_bytes_behind_a_null_are_no_tokens() -> None:
    offsets, validity = np.array([0, 2, 4, 6], dtype=np.int32), np.array([0b101], dtype=np.uint8)
    array = pa.Array.from_buffers(
        pa.string(), 3, [pa.py_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(b"abXXcd")]
    )
    assert array.to_pylist() == ["ab", None, "cd"]
    assert documents(array) == expected(["ab", None, "cd"])


def test_bytes_that_are_not_utf8_pass_unchanged() -> None:
    array = pa.array([b"\xff\x00", b"\xc3"]).cast(pa.string(), safe=False)
    assert documents(array) == [[255, 0, 256], [195, 256]]


def test_ids_stay_below_the_vocabulary() -> None:
    ids, _ = bytes_tokenizer.tokenize(pa.array(random_texts(seed=6, num_documents=200)))
    assert ids.max() == bytes_tokenizer.VOCABULARY - 1


@pytest.mark.parametrize("type", [pa.string(), pa.large_string()])
def test_bytes_alone_are_the_same_documents_with_a_zero_for_the_end(type: pa.DataType) -> None:
    array = pa.array(["", "ab", None, "\x00日", ""] * 3, type)[1:]
    ids, offsets = bytes_tokenizer.tokenize(array)
    content, same = bytes_tokenizer.BYTES_ALONE.tokenize(array, 0)
    assert content.dtype == np.uint8
    assert content.tolist() == np.where(ids == bytes_tokenizer.END_OF_DOCUMENT, 0, ids).tolist()
    assert same.tolist() == offsets.tolist()
    assert bytes_tokenizer.BYTES_ALONE.transform_id == bytes_tokenizer.TRANSFORM_ID


def test_texts_that_fill_an_array_of_strings_get_room_for_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*random_texts(seed=7, num_documents=50)]
    joined = []
    join = pc.binary_join_element_wise
    monkeypatch.setattr(
        pc, "binary_join_element_wise", lambda texts, *rest: joined.append(texts.type) or join(texts, *rest)
    )
    for most, type in ((1 << 31, pa.string()), (len("".join(texts).encode()), pa.large_string())):
        monkeypatch.setattr(bytes_tokenizer, "MOST_STRING_BYTES", most)
        assert documents(pa.array(texts)) == expected(texts)
        assert joined.pop() == type
