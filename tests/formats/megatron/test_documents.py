from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.book_pages import indexed_pages
from tests.support.indexed_datasets import random_sequences, write_dataset
from torchmix.errors import SourceUnreadable
from torchmix.formats.megatron import source as indexed_documents
from torchmix.formats.megatron.files import read_header
from torchmix.formats.megatron.source import IndexedDocuments, read_documents
from torchmix.storage.random_access import LocalFile


def documents_in(path: Path, **options: Any) -> IndexedDocuments:
    """The documents of a .bin."""
    file = LocalFile(path.with_suffix(".idx"))
    try:
        header = read_header(file)
        return read_documents(file, header, bin_bytes=path.stat().st_size, **options)
    finally:
        file.close()


def pages_of(found: IndexedDocuments) -> list[list[int]]:
    return np.stack([found.page_offset, found.page_bytes, found.page_rows], 1).tolist()


def spread(rng: np.random.Generator, lengths: Sequence[int], itemsize: int, how: str) -> tuple[list[int], int]:
    """First byte of each sequence, and the size of a .bin that holds them: in order, with gaps, or shuffled."""
    order = rng.permutation(len(lengths)) if how == "shuffled" else np.arange(len(lengths))
    starts, end = [0] * len(lengths), 0
    for i in order.tolist():
        end += itemsize * int(rng.integers(1, 9)) if how != "in order" and rng.random() < 0.1 else 0
        starts[i] = end
        end += itemsize * lengths[i]
    return starts, end + (itemsize if how == "gaps" else 0)


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
@pytest.mark.parametrize("how", ["in order", "gaps", "shuffled"])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint8"])
def test_pages_are_those_of_the_format_document(tmp_path, monkeypatch, block, how, dtype):
    """The second implementation counts one document after the other in plain integers."""
    monkeypatch.setattr(indexed_documents, "BLOCK_SEQUENCES", block)
    rng = np.random.default_rng(5)
    itemsize = np.dtype(dtype).itemsize
    for count, mean in [(0, 1), (1, 1), (30, 9000), (40, 30_000), (300, 700)]:
        lengths = (rng.lognormal(0, 1, count) * mean * (rng.random(count) > 0.2)).astype(int).tolist()
        starts, size = spread(rng, lengths, itemsize, how)
        sequences = [np.zeros(length, dtype) for length in lengths]
        path = write_dataset(tmp_path / "web", sequences, dtype=dtype, pointers=starts, content=bytes(size))
        told: list[int] = []
        found = documents_in(path, progress=told.append)
        assert pages_of(found) == indexed_pages(starts, lengths, itemsize)
        assert found.tokens.tolist() == (lengths if any(lengths) else [])
        assert found.used_bytes == sum(told) == itemsize * sum(lengths)


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
def test_documents_of_several_sequences_are_joined_wherever_they_begin(tmp_path, monkeypatch, block):
    monkeypatch.setattr(indexed_documents, "BLOCK_SEQUENCES", block)
    rng = np.random.default_rng(6)
    for count in [1, 2, 5, 40]:
        for _ in range(6):
            sequences = random_sequences(int(rng.integers(99)), count, empty=0.3)
            borders = np.sort(rng.integers(0, count + 1, int(rng.integers(0, 2 * count))))
            if rng.random() < 0.3:  # the first ones are sequences of their own
                borders = np.sort(np.concatenate([np.arange(count // 2), borders[borders > count // 2]]))
            borders = np.array([0, *borders, count])
            found = documents_in(write_dataset(tmp_path / "web", sequences, documents=borders))
            ends = np.cumsum([0, *map(len, sequences)])
            tokens = (ends[borders[1:]] - ends[borders[:-1]]).tolist()
            assert found.tokens.tolist() == (tokens if any(tokens) else [])
            assert pages_of(found) == indexed_pages((2 * ends[borders[:-1]]).tolist(), tokens, 2)


def test_more_documents_without_tokens_than_sequences_are_kept(tmp_path):
    path = write_dataset(tmp_path / "web", [[1, 2], [3]], documents=[0, 0, 0, 1, 1, 2, 2])
    found = documents_in(path)
    assert (found.tokens.tolist(), pages_of(found)) == ([0, 0, 2, 0, 1, 0], [[0, 6, 6]])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pointers": [0, 6, -2]}, "document 2 is 2 bytes from byte -2 .* which has 14 bytes"),
        ({"pointers": [0, 6, 14]}, "document 2 is 2 bytes from byte 14 .*: copy both again"),
        ({"pointers": [0, 6, 13]}, "document 2 is 2 bytes from byte 13 .* tokens of 2"),
        ({"pointers": [2**63 - 2, 6, 12]}, f"document 0 is 6 bytes from byte {2**63 - 2}"),
        (
            {"content": bytes(13)},
            "document 2 is 2 bytes from byte 12 .* has 13 bytes and tokens of 2; the .bin was cut",
        ),
        (
            {"documents": [0, 3]} | {"pointers": [0, 8, 6]},
            "document 0 lies in several places .* sequence 1 begins at byte 8",
        ),
        ({"documents": [1, 3]}, "documents are sequences 1 to 3, the file has 3"),
        ({"documents": [0, 1, 2]}, "documents are sequences 0 to 2, the file has 3; it was not finished"),
        ({"documents": [0]}, "documents are sequences 0 to 0, the file has 3"),
        ({"documents": [0, 2, 1, 3]}, "document 2 begins at sequence 1, before the one before it"),
        ({"documents": [0, 1, 9, 3]}, "document 3 begins at sequence 3, before the one before it"),
    ],
)
def test_what_contradicts_itself_or_the_bin_is_named(tmp_path, changes, says):
    path = write_dataset(tmp_path / "web", [[1, 2, 3], [4, 5, 6], [7]], **changes)
    with pytest.raises(SourceUnreadable, match=f"^{says}"):
        documents_in(path)


def test_a_negative_length_is_named(tmp_path):
    path = write_dataset(tmp_path / "web", [[1, 2, 3], [4, 5, 6], [7]])
    index = path.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[38:42] = np.int32(-3).tobytes()
    index.write_bytes(content)
    with pytest.raises(SourceUnreadable, match="sequence 1 has -3 tokens"):
        documents_in(path)


def test_a_document_longer_than_lengths_can_tell_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_documents, "MAX_DOCUMENT_TOKENS", 5)
    path = write_dataset(tmp_path / "web", [[1, 2, 3], [4, 5, 6], [7]], documents=[0, 1, 3])
    documents_in(path)
    write_dataset(tmp_path / "web", [[1, 2, 3], [4, 5, 6], [7]], documents=[0, 2, 3])
    with pytest.raises(SourceUnreadable, match="document 0 has 6 tokens in 2 sequences, at most 5"):
        documents_in(path)
