"""Tokenizers over a vocabulary, against the libraries called for one text at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
from tokenizers import Tokenizer

from tests.support.files import random_texts
from tests.support.vocabularies import END, TINY, install_tiny_encoding, make_tokenizer
from torchmix.errors import SourceUnreadable
from torchmix.transform import tokenizer as text_batches
from torchmix.transform.open_tokenizer import Tokenizers
from torchmix.transform.tokenizer import PROBE
from torchmix.transform.vocabulary_tokenizer import HuggingFaceEncoder, TiktokenEncoder

TEXTS = ["", None, "a", f"quick {END} brown <user>", "日本語 🙂", None, "the  the\n\n1234567", "naïve\x00"]
Encode = Callable[[str], list[int]]


@pytest.fixture(params=["huggingface", "tiktoken"])
def vocabulary(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Encode]:
    """The recipe's words for a tokenizer, and its library's encoding of one text without special tokens."""
    if request.param == "tiktoken":
        encoding = install_tiny_encoding(monkeypatch)
        return f"tiktoken:{TINY}", encoding.encode_ordinary
    library = Tokenizer.from_file(str(make_tokenizer(tmp_path / "tok" / "tokenizer.json")))
    library.encode_special_tokens = True
    return "tok/tokenizer.json", lambda text: library.encode(text, add_special_tokens=False).ids


def expected(texts: Sequence[str | None], encode: Encode, begin: list[int], end: list[int]) -> list[list[int]]:
    return [[] if text is None else [*begin, *encode(text), *end] for text in texts]


@pytest.mark.parametrize(("begin_id", "end_id"), [(None, None), (None, 7), (299, None), (3, 70_000), (END, END)])
@pytest.mark.parametrize("type", [pa.string(), pa.large_string()])
def test_documents_are_those_of_the_library(
    vocabulary: tuple[str, Encode],
    tmp_path: Path,
    begin_id: int | str | None,
    end_id: int | str | None,
    type: pa.DataType,
) -> None:
    words, encode = vocabulary
    tokenizer = Tokenizers(tmp_path).open("web", words, begin_id=begin_id, end_id=end_id)
    special = 0 if words.endswith("json") else 300
    begin, end = ([] if token is None else [special if token == END else token] for token in (begin_id, end_id))
    for texts in (TEXTS, [], [None], [""], random_texts(3, 200)):
        array = pa.array(texts, type)
        ids, offsets = tokenizer.tokenize(array, 0)
        found = [part.tolist() for part in np.split(ids, offsets[1:-1])][: len(texts)]
        assert found == expected(texts, encode, begin, end)
        np.testing.assert_array_equal(np.diff(offsets), tokenizer.count_tokens(array, 0))
        assert offsets.dtype == np.int64
        assert ids.dtype == (np.int32 if end_id == 70_000 else np.uint16)


def test_special_tokens_in_a_text_are_text(vocabulary: tuple[str, Encode], tmp_path: Path) -> None:
    tokenizer = Tokenizers(tmp_path).open("web", vocabulary[0], end_id=END)
    ids, _ = tokenizer.tokenize(pa.array([f"a{END}b"]), 0)
    assert (ids == ids[-1]).sum() == 1
    assert tokenizer.decode(ids[:-1].tolist()) == f"a{END}b"


def test_ids_become_text_again(vocabulary: tuple[str, Encode], tmp_path: Path) -> None:
    tokenizer = Tokenizers(tmp_path).open("web", vocabulary[0], begin_id=60_000, end_id=END)
    ids, _ = tokenizer.tokenize(pa.array(["quick naïve 日本語"]), 0)
    assert tokenizer.decode(ids.tolist()) == f"<|60000|>quick naïve 日本語{END}"
    assert tokenizer.decode([]) == ""


def test_batches_do_not_alter_documents(
    vocabulary: tuple[str, Encode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*TEXTS, *random_texts(1, 300), "alpha " * 2000]
    tokenizer = Tokenizers(tmp_path).open("web", vocabulary[0], end_id=1)
    whole = tokenizer.tokenize(pa.array(texts), 0)
    monkeypatch.setattr(text_batches, "BATCH_BYTES", 50)
    monkeypatch.setattr(text_batches, "BATCH_TEXTS", 3)
    for one, other in zip(whole, tokenizer.tokenize(pa.array(texts), 0), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.diff(whole[1]), tokenizer.count_tokens(pa.array(texts), 0))


def test_a_text_that_is_no_utf8_is_named_by_its_row(vocabulary: tuple[str, Encode], tmp_path: Path) -> None:
    tokenizer = Tokenizers(tmp_path).open("web", vocabulary[0])
    raw = pa.array([b"good", None, b"also \xc3\xa9", b"ba\xffd", b"\xfe"], pa.binary())
    array = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0], raw.null_count)
    for call in (tokenizer.tokenize, tokenizer.count_tokens):
        with pytest.raises(SourceUnreadable, match=r"^row 1003 is not valid UTF-8: byte 2 is 0xff"):
            call(array, 1000)


def test_the_transform_is_known_by_what_it_does(vocabulary: tuple[str, Encode], tmp_path: Path) -> None:
    words, _ = vocabulary

    def transform(**ids: int | str) -> str:
        return Tokenizers(tmp_path).open("web", words, **ids).transform_id

    assert transform() == transform()
    special = 0 if words.endswith("json") else 300
    assert transform(end_id=END) == transform(end_id=special)
    assert len({transform(), transform(end_id=1), transform(begin_id=1), transform(begin_id=1, end_id=1)}) == 4
    assert transform().split(":")[0] == ("huggingface-1" if words.endswith("json") else "tiktoken-1")


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "a.json")
    content = json.loads(path.read_text())

    def transform(**changes: object) -> str:
        (tmp_path / "b.json").write_text(json.dumps({**content, **changes}, indent=1))
        return Tokenizers(tmp_path).open("web", "b.json").transform_id

    same = Tokenizers(tmp_path).open("web", "a.json").transform_id
    assert transform() == same, "neither the path nor the layout of the file counts"
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert transform(truncation=truncation) == same, "and truncation is never applied"
    assert transform(added_tokens=content["added_tokens"][:1]) != same
    assert transform(normalizer={"type": "NFC"}) != same


def test_a_library_that_splits_otherwise_is_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_tiny_encoding(monkeypatch)
    transform = Tokenizers(tmp_path).open("web", f"tiktoken:{TINY}").transform_id

    encode = tiktoken.Encoding.encode_ordinary
    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", lambda self, text: encode(self, text)[::-1])
    assert Tokenizers(tmp_path).open("web", f"tiktoken:{TINY}").transform_id != transform


def test_what_a_transform_covers_is_frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vectors = json.loads((Path(__file__).parents[2] / "docs" / "vectors.json").read_text(encoding="utf-8"))
    assert vectors["tokenizer_probe"] == PROBE
    install_tiny_encoding(monkeypatch)
    content = TiktokenEncoder(TINY, "here").content
    assert content == "a8a9ef6c68db3eb72231503d418ec757eb3b9512785a7f2d25dd611b07e98add"
    plain = {"version": "1.0", "model": {"type": "BPE", "vocab": {"é": 0}, "merges": []}, "padding": None}
    (tmp_path / "t.json").write_text(json.dumps(plain))
    content = HuggingFaceEncoder(tmp_path / "t.json", "here").content
    text = '{"model":{"merges":[],"type":"BPE","vocab":{"\\u00e9":0}},"version":"1.0"}'
    assert content == hashlib.sha256(text.encode()).hexdigest()
