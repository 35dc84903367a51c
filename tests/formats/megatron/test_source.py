"""Megatron datasets as a source, against Megatron's own reader and builder of them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.book_pages import indexed_footer_hash
from tests.support.indexed_datasets import documents_of, megatron_indexed, random_sequences, write_dataset
from tests.support.recipes import make_recipe
from torchmix.catalog.store import Catalog
from torchmix.errors import CorruptPage, SourceChanged, SourceUnreadable
from torchmix.formats.megatron.source import IndexedSource
from torchmix.formats.source import PageRun
from torchmix.indexing.scan import index_recipe, index_sources
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.structs import Recipe
from torchmix.storage.random_access import LocalFile

SOURCE = IndexedSource(name="web")
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "uint16"]


@pytest.fixture(scope="module")
def megatron() -> Iterator[ModuleType]:
    with megatron_indexed() as module:
        yield module


def recipe_of(path: str | tuple[str, ...]) -> Recipe:
    return make_recipe({"web": "100%"}, sources={"web": {"path": path, "tokens": None, "format": "megatron"}})


def read_all(catalog: Catalog, directory: Path) -> list[list[int]]:
    """Every document of the one source, by a reader."""
    reader = Reader(catalog, directory, cache_bytes=1 << 20)
    tokens = catalog.sources["web"].sizes.tokens.astype(np.int64)
    wanted = WantedPieces.end_to_end(source=0, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens)
    try:
        return [document.tolist() for document in np.split(reader.read(wanted).values, wanted.places[1:])]
    finally:
        reader.close()


def scan_all(path: Path) -> list[list[int]]:
    """Every document of a file, from its scan and its bytes, without a catalog."""
    scan, content = SOURCE.scan(path), path.read_bytes()
    documents: list[list[int]] = []
    for offset, num_bytes, num_rows in zip(scan.page_offset, scan.page_bytes, scan.page_rows, strict=True):
        run = PageRun(
            pages=content[offset : offset + num_bytes],
            companion=b"",
            schema=scan.schema,
            kind=0,
            num_rows=num_rows,
            path=str(path),
            offset=offset,
            first_row=len(documents),
            tokens=scan.tokens[len(documents) : len(documents) + num_rows],
        )
        [decoded] = SOURCE.decode([run])
        documents += [part.tolist() for part in np.split(decoded.values, decoded.offsets[1:-1])]
    return documents


def build(
    megatron: ModuleType, prefix: Path, documents: Sequence[Sequence[NDArray[Any]]], dtype: str, modes: bool
) -> None:
    """Write documents of several sequences each with Megatron's builder, by both of its ways."""
    prefix.parent.mkdir(exist_ok=True)
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type, multimodal=modes)
    for number, sequences in enumerate(documents):
        if number % 2:
            for place, sequence in enumerate(sequences):
                builder.add_item(torch.from_numpy(sequence.astype(np.int64)), mode=place % 3)
            builder.end_document()
        else:
            joined = np.concatenate([np.zeros(0, np.int64), *sequences])
            builder.add_document(joined, [len(sequence) for sequence in sequences], [0] * len(sequences))
    builder.finalize(f"{prefix}.idx")


def documents_by_megatron(megatron: ModuleType, prefix: Path, *, modes: bool) -> list[list[int]]:
    dataset = megatron.IndexedDataset(str(prefix), multimodal=modes)
    items = [dataset[i] for i in range(len(dataset))]
    sequences = [np.array(item[0] if modes else item) for item in items]
    return [document.tolist() for document in documents_of(sequences, dataset.document_indices.tolist())]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("modes", [False, True])
def test_what_megatron_builds_is_read_as_megatron_reads_it(tmp_path, megatron, dtype, modes):
    rng = np.random.default_rng(1)
    for number, most in enumerate([1, 1, 4]):
        sequences = iter(random_sequences(number, 400, mean_tokens=30 if number else 4000, dtype=dtype))
        documents = [
            [next(sequences) for _ in range(int(rng.integers(0 if most > 1 else 1, most + 1)))] for _ in range(60)
        ]
        prefix = tmp_path / f"set {number}" / "web_text_document"
        build(megatron, prefix, documents, dtype, modes)
        found = read_all(index_recipe(recipe_of(str(prefix)), tmp_path), tmp_path)
        assert found == documents_by_megatron(megatron, prefix, modes=modes)
        assert any(map(len, found))


def test_a_scan_reads_nothing_of_the_bin_but_samples(tmp_path):
    path = write_dataset(tmp_path / "web", random_sequences(3, 200, mean_tokens=4000))
    scan = SOURCE.scan(path)
    path.write_bytes(bytes(path.stat().st_size))
    again = SOURCE.scan(path)
    assert again.footer_hash != scan.footer_hash
    for name in ("page_offset", "page_bytes", "page_rows", "tokens", "chunk_of_page"):
        np.testing.assert_array_equal(getattr(again, name), getattr(scan, name))
    assert (scan.num_bytes, scan.schema, scan.split_pages) == (path.stat().st_size, b"<u2", 0)
    assert scan.page_bytes.sum() == path.stat().st_size and len(scan.page_offset) > 20


@pytest.mark.parametrize(("count", "mean_tokens"), [(3, 10), (200, 4000), (40_000, 3)])
def test_the_footer_hash_is_that_of_the_format_document(tmp_path, count, mean_tokens):
    path = write_dataset(tmp_path / "web", random_sequences(4, count, mean_tokens=mean_tokens))
    expected = indexed_footer_hash(path.read_bytes(), path.with_suffix(".idx").read_bytes())
    assert SOURCE.scan(path).footer_hash == expected
    file = LocalFile(path)
    try:
        assert SOURCE.fingerprint(file, str(path)) == (path.stat().st_size, expected)
    finally:
        file.close()


def test_every_byte_of_a_small_dataset_is_part_of_its_identity(tmp_path):
    path = write_dataset(tmp_path / "web", random_sequences(5, 12))
    seen = {SOURCE.scan(path).footer_hash}
    changed = 0
    for half in (path, path.with_suffix(".idx")):
        content = half.read_bytes()
        for offset in range(len(content)):
            half.write_bytes(content[:offset] + bytes([content[offset] ^ 0x41]) + content[offset + 1 :])
            file = LocalFile(path)
            try:
                seen.add(SOURCE.fingerprint(file, str(path))[1])
            finally:
                file.close()
            changed += 1
        half.write_bytes(content)
    assert len(seen) == changed + 1


def test_every_altered_byte_of_an_index_is_an_error_or_read_as_megatron_reads_it(tmp_path, megatron):
    sequences = random_sequences(6, 9, mean_tokens=12, empty=0)
    path = write_dataset(tmp_path / "web", sequences, documents=[0, 1, 2, 3, 5, 6, 7, 8, 9])
    index = path.with_suffix(".idx")
    content = index.read_bytes()
    read = refused = 0
    for offset in range(len(content)):
        for flip in (0x01, 0x80):
            index.write_bytes(content[:offset] + bytes([content[offset] ^ flip]) + content[offset + 1 :])
            try:
                found = scan_all(path)
            except SourceUnreadable as error:
                assert "web.idx" in str(error)
                refused += 1
                continue
            assert found == documents_by_megatron(megatron, tmp_path / "web", modes=False)
            read += 1
    assert read > 3 and refused > 200


def test_a_cut_bin_is_an_error_at_any_length(tmp_path):
    path = write_dataset(tmp_path / "web", random_sequences(7, 30, empty=0))
    content = path.read_bytes()
    for length in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(SourceUnreadable, match=f"has {length} bytes and tokens of 2; the .bin was cut"):
            SOURCE.scan(path)


def test_many_files_of_any_type_make_one_source(tmp_path):
    documents: list[list[int]] = []
    for number, dtype in enumerate(DTYPES):
        sequences = random_sequences(number, 20, dtype=dtype)
        write_dataset(tmp_path / f"{number}", sequences, dtype=dtype)
        documents += [sequence.tolist() for sequence in sequences]
    catalog = index_recipe(recipe_of("*.idx"), tmp_path)
    assert read_all(catalog, tmp_path) == documents
    assert len(catalog.sources["web"].schemas) == len(DTYPES)


def test_files_without_a_token_have_no_rows_and_a_source_of_them_is_an_error(tmp_path):
    write_dataset(tmp_path / "a", [[], []])
    write_dataset(tmp_path / "b", [[1, 2], [], [3]])
    write_dataset(tmp_path / "c", [])
    catalog = index_recipe(recipe_of("*.idx"), tmp_path)
    assert [file.num_rows for file in catalog.sources["web"].files] == [0, 3, 0]
    assert read_all(catalog, tmp_path) == [[1, 2], [], [3]]
    with pytest.raises(SourceUnreadable, match="source 'web': a holds no documents; remove the source"):
        index_recipe(recipe_of("a"), tmp_path)


def test_only_what_changed_is_scanned_again(tmp_path):
    for name in "abc":
        write_dataset(tmp_path / name, random_sequences(ord(name), 30))
    report = index_sources(recipe_of("*.bin"), tmp_path)
    assert (report.scanned_files, report.kept_files) == (3, 0)
    assert index_sources(recipe_of(("a", "b.idx", "c.bin")), tmp_path).kept_files == 3
    write_dataset(tmp_path / "b", random_sequences(99, 31))
    write_dataset(tmp_path / "d", random_sequences(100, 5))
    report = index_sources(recipe_of("*.bin"), tmp_path)
    assert (report.scanned_files, report.kept_files) == (2, 2)
    assert [(change.path, change.change) for change in report.changes] == [("b.bin", "changed"), ("d.bin", "added")]


def other_tokens(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[::-1])


def other_lengths(path: Path) -> None:
    index = path.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[34:38], content[38:42] = content[38:42], content[34:38]
    index.write_bytes(content)


def no_index(path: Path) -> None:
    path.with_suffix(".idx").unlink()


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"12")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_tokens, "has footer hash"),
        (other_lengths, "has footer hash"),
        (no_index, "web.idx cannot be opened: No such file"),
        (longer, "has 1[0-9]* bytes; it was indexed with"),
    ],
)
def test_a_dataset_that_changed_is_noticed_before_it_is_used(tmp_path, change, says):
    path = write_dataset(tmp_path / "web", random_sequences(8, 30, empty=0))
    catalog = index_recipe(recipe_of("web"), tmp_path)
    change(path)
    with pytest.raises(SourceChanged, match=f"source 'web': .*web.bin: .*{says}.*run torchmix index"):
        read_all(catalog, tmp_path)


def test_documents_of_several_sequences_and_modes_are_told_once(tmp_path, caplog):
    write_dataset(tmp_path / "web", random_sequences(9, 6), documents=[0, 2, 4, 6], modes=[0, 1, 0, 2, 0, 0])
    with caplog.at_level(logging.WARNING):
        index_recipe(recipe_of("web"), tmp_path)
    messages = [record.getMessage() for record in caplog.records]
    assert any("web.idx: 6 sequences in 3 documents; torchmix keeps a document together" in text for text in messages)
    assert any("web.idx: 2 of 6 sequences have a mode; they are read as tokens" in text for text in messages)


def test_a_usual_dataset_is_indexed_without_a_word(tmp_path, caplog):
    write_dataset(tmp_path / "web", random_sequences(9, 6), modes=[0] * 6)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        index_recipe(recipe_of("web"), tmp_path)
    assert not caplog.records


def test_a_page_of_another_size_than_its_documents_is_an_error():
    run = PageRun(
        pages=bytes(10), companion=b"", schema=b"<u2", kind=0, num_rows=2, path="web.bin", offset=0, first_row=0,
        tokens=np.array([3, 3], np.int32),
    )  # fmt: skip
    with pytest.raises(CorruptPage, match="the page at byte 0 has 10 bytes, its 2 documents have 6 tokens of 2"):
        SOURCE.decode([run])
