from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from msgspec.structs import replace

from tests.support.arrow_files import among_others, token_dictionary, write_arrow
from tests.support.files import random_texts, random_tokens
from tests.support.pages import as_lists, documents_by_page, page_runs
from torchmix.errors import CatalogError, CorruptPage, SourceUnreadable
from torchmix.formats.arrow import column as arrow_slices
from torchmix.formats.arrow.column import reads_views
from torchmix.formats.arrow.scan import BATCH, MESSAGE, SLICES
from torchmix.formats.arrow.source import ArrowSource

TOKEN_TYPES = [
    pa.list_(pa.int32()),
    pa.large_list(pa.int64()),
    pa.list_(pa.uint16()),
    pa.list_(pa.int8()),
    pa.list_(pa.int32(), 3),
    pa.list_view(pa.int32()),
    pa.large_list_view(pa.int16()),
    pa.list_(pa.dictionary(pa.int32(), pa.int32())),
]
TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_string()),
]
SLICED = [str(one) for one in (*TOKEN_TYPES[:5], *TEXT_TYPES[:2])]


def source(kind: str = "text", column: str = "v") -> ArrowSource:
    return ArrowSource(name="web", column=column, kind=kind)


def expected(documents: list[Any]) -> list[list[int]]:
    return [[] if one is None else [*one.encode(), 256] if isinstance(one, str) else list(one) for one in documents]


def make_column(held_type: pa.DataType, rng: random.Random, num_rows: int) -> tuple[pa.Array, list[Any]]:
    """A column of a type, some of its rows null, and what is in it."""
    seed = rng.randint(0, 1000)
    documents: list[Any] = random_texts(seed, num_rows)
    if held_type in TOKEN_TYPES:
        documents = random_tokens(seed, num_rows, vocabulary=120)
        if pa.types.is_fixed_size_list(held_type):
            documents = [[i % 7, i % 5, i % 3] for i in range(num_rows)]
    nulls = rng.choice([0.0, 0.2, 0.2, 1.0])
    documents = [None if rng.random() < nulls else one for one in documents]
    if held_type == TOKEN_TYPES[-1]:
        return token_dictionary(documents), documents
    if pa.types.is_dictionary(held_type):
        return pa.array(documents, held_type.value_type).dictionary_encode(), documents
    return pa.array(documents, held_type), documents


@pytest.mark.parametrize("held_type", [*TOKEN_TYPES, *TEXT_TYPES], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_documents_read_by_page_are_those_of_the_file(tmp_path, held_type, stream, monkeypatch):
    kinds: Counter[int] = Counter()
    for seed, (codec, num_rows) in enumerate([(None, 90), ("lz4", 50), ("zstd", 50), (None, 1), ("lz4", 0)]):
        rng = random.Random(seed)
        monkeypatch.setattr(arrow_slices, "PAGE_BYTES", rng.choice([16, 200, 4096]))
        array, documents = make_column(held_type, rng, num_rows)
        column = "v"
        if rng.random() < 0.4:  # within a struct, that may be null itself
            column = "v.w"
            mask = [rng.random() < 0.2 for _ in range(num_rows)]
            documents = [None if is_null else one for is_null, one in zip(mask, documents, strict=True)]
            others = [pa.array(["a"] * num_rows, pa.string_view()), array, pa.array([[1]] * num_rows)]
            array = pa.StructArray.from_arrays(others, names=["p", "w", "q"], mask=pa.array(mask, pa.bool_()))
        batch_rows = rng.choice([1, 7, 40, 1000])
        path = write_arrow(
            tmp_path / "x.arrow", among_others(array, seed), stream=stream, codec=codec, batch_rows=batch_rows
        )
        own = source("tokens" if held_type in TOKEN_TYPES else "text", column)
        if held_type == pa.string_view() and not reads_views():
            pytest.skip(f"pyarrow {pa.__version__} makes no views of text from buffers")
        own.check(path)
        told: list[int] = []
        scan = own.scan(path, progress=told.append)
        assert scan.num_rows == len(documents) == scan.page_rows.sum()
        assert scan.tokens.tolist() == [len(tokens) for tokens in expected(documents)]
        assert documents_by_page(own, path, scan, most_pages=3) == expected(documents)
        assert sum(told) <= path.stat().st_size
        kinds.update(scan.kind.tolist())
        assert codec is None or SLICES not in scan.kind
    wanted = MESSAGE if "dictionary" in str(held_type) else SLICES
    assert (wanted in kinds) == (wanted == MESSAGE or str(held_type) in SLICED)


def test_a_page_is_the_rows_whose_values_begin_in_the_same_64_kib_of_a_batch(tmp_path):
    lists = [list(range(1000))] * 100
    path = write_arrow(tmp_path / "x.arrow", pa.table({"v": pa.array(lists, pa.list_(pa.int32()))}), batch_rows=60)
    scan = source("tokens").scan(path)
    assert scan.page_rows.tolist() == [17, 16, 17, 10, 17, 16, 7]  # 16.4 rows of 4000 bytes begin in 64 KiB
    assert scan.page_bytes.tolist() == [4000 * rows for rows in scan.page_rows]
    assert scan.companion_bytes.tolist() == [4 * (rows + 1) for rows in scan.page_rows]
    assert scan.chunk_of_page.tolist() == list(range(7)) and set(scan.kind) == {SLICES} and not scan.whole_chunks


def test_rows_without_bytes_belong_to_the_page_before_them(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_slices, "PAGE_BYTES", 8)
    texts = ["", "abcdefgh", "", "i", None, "", "0123456789" * 2, "", "", None]
    path = write_arrow(tmp_path / "x.arrow", pa.table({"v": texts}))
    scan = source().scan(path)
    assert scan.page_rows.tolist() == [2, 8]  # what begins at 0; at 8 and at 9; behind byte 29 nothing has bytes
    assert documents_by_page(source(), path, scan) == expected(texts)
    path = write_arrow(tmp_path / "y.arrow", pa.table({"v": ["", None, ""]}))
    scan = source().scan(path)
    assert scan.page_rows.tolist() == [3] and scan.kind.tolist() == [BATCH] and (scan.page_bytes > 0).all()
    assert documents_by_page(source(), path, scan) == [[256], [], [256]]


def test_what_lies_behind_a_null_is_no_part_of_it(tmp_path):
    values = pa.array([1, 2, 3, 4, 5, 6], pa.int32())
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 5, 6], pa.int32()), values, mask=pa.array([False, True, False]))
    assert lists.offsets.to_pylist() == [0, 2, 5, 6]
    texts = pa.Array.from_buffers(
        pa.string(),
        3,
        [pa.py_buffer(b"\x05"), pa.array([0, 2, 5, 6], pa.int32()).buffers()[1], pa.py_buffer(b"abcdef")],
    )
    path = write_arrow(tmp_path / "x.arrow", pa.table({"v": lists, "t": texts}))
    for own, documents in (
        (source("tokens"), [[1, 2], [], [6]]),
        (source("text", "t"), [[97, 98, 256], [], [102, 256]]),
    ):
        scan = own.scan(path)
        assert scan.kind.tolist() == [SLICES]
        assert documents_by_page(own, path, scan) == documents


def test_a_file_of_large_pages_is_marked(tmp_path):
    table = pa.table({"v": ["0123456789abcdef" * 64] * 2000})
    path = tmp_path / "x.feather"
    pyarrow.feather.write_feather(table, path, compression="lz4", chunksize=2000)
    assert not source().scan(path).whole_chunks  # 2 MB, which lz4 makes small
    rng = np.random.default_rng(1)
    tokens = pa.array(rng.integers(0, 2**31, (500, 1000)).tolist(), pa.list_(pa.int32()))
    pyarrow.feather.write_feather(pa.table({"v": tokens}), path, compression="lz4")
    scan = source("tokens").scan(path)
    assert scan.whole_chunks and scan.page_rows.tolist() == [500]
    pyarrow.feather.write_feather(pa.table({"v": tokens}), path, compression="uncompressed")
    assert not source("tokens").scan(path).whole_chunks


@pytest.mark.parametrize(
    ("column", "kind", "says"),
    [
        ("w", "text", r"no column 'w'; it has: "),
        ("number", "tokens", "column 'number' is int64, not a list of integers"),
        ("number", "text", "column 'number' is int64, not a string"),
        ("v", "tokens", "column 'v' is string, not a list of integers; use `text` with a tokenizer"),
        ("struct.y", "tokens", r"column 'struct\.y' is list of string, not a list of integers"),
        ("struct.z", "text", r"no column 'struct\.z'; did you mean 'struct\.y'\? it has: "),
        ("struct", "text", r"no column 'struct'; it is a struct, name a field of it: struct\.x, struct\.y"),
    ],
)
def test_a_column_that_is_not_there_or_holds_something_else_is_named(tmp_path, column, kind, says):
    path = write_arrow(tmp_path / "x.arrow", among_others(pa.array(["a", "b"])))
    for look in (source(kind, column).check, source(kind, column).scan):
        with pytest.raises(SourceUnreadable, match=rf"source 'web': .*x\.arrow: {says}"):
            look(path)


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_leaves_within_lists_structs_and_maps_are_read_as_parquets_are(tmp_path, stream, codec):
    turn = pa.struct([("who", pa.string()), ("ids", pa.list_(pa.int32())), ("n", pa.int16())])
    rows = [
        {"turns": [{"who": "a", "ids": [1, 2], "n": 7}, None, {"who": "b", "ids": None, "n": 8}], "m": [("x", [3])]},
        {"turns": None, "m": None},
        {"turns": [], "m": []},
        {"turns": [{"who": "c", "ids": [4, 5, 6], "n": 9}], "m": [("y", [7, 8]), ("z", None)]},
    ]
    schema = pa.schema(
        [
            ("turns", pa.list_(turn)),
            ("m", pa.map_(pa.string(), pa.large_list(pa.int64()))),
            ("deep", pa.list_(pa.list_view(pa.list_(pa.uint8(), 2)))),
            ("raw", pa.binary()),
            ("raw_view", pa.binary_view()),
            ("id", pa.uuid()),
        ]
    )
    extra = {
        "deep": [[[[1, 2], [3, 4]], []], None, [None, [[5, 6]]], []],
        "raw": [b"\xff\x00", None, b"", b"abc"],
        "raw_view": [b"\xfe" * 20, None, b"", b"abc"],
        "id": [bytes(16)] * 4,
    }
    table = pa.table({name: pa.array(values, schema.field(name).type) for name, values in extra.items()})
    for name in ("turns", "m"):
        table = table.append_column(name, pa.array([row[name] for row in rows], schema.field(name).type))
    path = write_arrow(tmp_path / "x.arrow", table, stream=stream, codec=codec, batch_rows=3)
    cases = {
        "turns.ids": ("tokens", [[1, 2], [], [], [4, 5, 6]]),
        "m.value": ("tokens", [[3], [], [], [7, 8]]),
        "deep": ("tokens", [[1, 2, 3, 4], [], [5, 6], []]),
        "raw": ("text", [[255, 0, 256], [], [256], [97, 98, 99, 256]]),
        "raw_view": ("text", [[254] * 20 + [256], [], [256], [97, 98, 99, 256]]),
    }
    for column, (kind, documents) in cases.items():
        own = source(kind, column)
        scan = own.scan(path)
        assert documents_by_page(own, path, scan) == documents, column
        assert scan.tokens.tolist() == [len(tokens) for tokens in documents]


def test_views_of_text_need_a_pyarrow_that_makes_them(tmp_path, monkeypatch):
    path = write_arrow(tmp_path / "x.arrow", pa.table({"v": pa.array(["a"], pa.string_view())}))
    monkeypatch.setattr("torchmix.formats.arrow.column.reads_views", lambda: False)
    with pytest.raises(SourceUnreadable, match=r"column 'v' is string_view, which pyarrow .* update pyarrow"):
        source().check(path)


def test_a_null_inside_a_list_names_its_row(tmp_path):
    path = write_arrow(tmp_path / "x.arrow", pa.table({"v": [[1], [2, 3], [4, None]]}), batch_rows=2)
    with pytest.raises(SourceUnreadable, match="row 2 holds a null inside its list of tokens"):
        source("tokens").scan(path)


def test_a_dictionary_that_comes_in_parts_is_refused_and_one_that_is_replaced_is_read(tmp_path):
    first, second = (pa.array(words).dictionary_encode() for words in (["a", "b"], ["a", "b", "c"]))
    schema = pa.schema([("v", first.type)])
    for deltas in (False, True):
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
        with pa.ipc.new_stream(str(tmp_path / "x.arrow"), schema, options=options) as writer:
            for array in (first, second):
                writer.write_batch(pa.record_batch([array], schema=schema))
        if deltas:
            with pytest.raises(SourceUnreadable, match="dictionary of the column comes in parts"):
                source().scan(tmp_path / "x.arrow")
        else:
            scan = source().scan(tmp_path / "x.arrow")
            assert documents_by_page(source(), tmp_path / "x.arrow", scan) == expected(["a", "b", "a", "b", "c"])


def test_files_of_other_kinds_are_named(tmp_path):
    path = write_arrow(tmp_path / "x.arrow", pa.table({"v": ["a"]}))
    whole = path.read_bytes()
    cases = [
        (b"", "it is empty, without a schema; take it out"),
        (b"PAR1" * 10, r"its schema does not parse .* it is Parquet; name it \.parquet"),
        (b'{"v":"a"}\n' * 5, r"its schema does not parse .* it is JSON without compression; name it \.jsonl"),
        (b"FEA1" + bytes(40), "Feather version 1 is not read"),
        (whole[:-1], "not a whole Arrow file .* is it still being written, or cut short"),
        (whole[:50], "not a whole Arrow file"),
    ]
    for content, says in cases:
        path.write_bytes(content)
        for look in (source().check, source().scan):
            with pytest.raises(SourceUnreadable, match=rf"x\.arrow: {says}"):
                look(path)
    path.unlink()
    with pytest.raises(SourceUnreadable, match="cannot be opened: No such file"):
        source().scan(path)


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_a_stream_or_file_cut_anywhere_is_an_error_or_ends_with_a_batch(tmp_path, stream):
    table = pa.table({"v": random_texts(2, 40)})
    path = write_arrow(tmp_path / "x.arrow", table, stream=stream, batch_rows=10)
    whole = path.read_bytes()
    num_rows = set()
    for cut in range(0, len(whole), 11):
        path.write_bytes(whole[:cut])
        try:
            num_rows.add(source().scan(path).num_rows)
        except CatalogError as error:
            assert str(path) in str(error)
    assert num_rows <= ({0, 10, 20, 30, 40} if stream else set())


@pytest.mark.slow
@pytest.mark.parametrize("held_type", [TOKEN_TYPES[0], TOKEN_TYPES[4], TOKEN_TYPES[5], *TEXT_TYPES[:4]], ids=str)
@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_a_damaged_file_is_an_error_or_some_rows_and_never_a_crash(tmp_path, held_type, codec, monkeypatch):
    monkeypatch.setattr(arrow_slices, "PAGE_BYTES", 64)
    array, _ = make_column(held_type, random.Random(1), 12)
    path = write_arrow(
        tmp_path / "x.arrow", pa.table({"a": pa.array(range(12)), "v": array}), codec=codec, batch_rows=7
    )
    own = source("tokens" if held_type in TOKEN_TYPES else "text")
    whole = path.read_bytes()
    rng = random.Random(2)
    for i in range(int(codec is None), len(whole), 41):
        damaged = bytearray(whole)
        damaged[i] ^= rng.choice([0xFF, 0x01, 0x80])
        path.write_bytes(damaged)
        try:
            scan = own.scan(path)
            assert len(documents_by_page(own, path, scan)) == scan.num_rows
        except CatalogError as error:
            assert str(path) in str(error)


def test_a_page_that_was_altered_names_file_page_and_rows(tmp_path):
    path = write_arrow(tmp_path / "x.arrow", pa.table({"v": [[1, 2], [3], [4]]}))
    own = source("tokens")
    run = next(page_runs(path, own.scan(path)))
    assert as_lists(own.decode([run])[0]) == [[1, 2], [3], [4]]
    with pytest.raises(
        CorruptPage, match=rf"x\.arrow: the page at bytes \[{run.offset}, {run.offset + 24}\), rows \[0, 3\), does not"
    ):
        own.decode([replace(run, pages=run.pages[:-8])])


def test_the_identity_is_of_the_files_ends(tmp_path):
    path = write_arrow(tmp_path / "x.arrow", pa.table({"v": ["a"]}))
    scan = source().scan(path)
    other = write_arrow(Path(tmp_path / "y.arrow"), pa.table({"v": ["b"]}))
    assert scan.num_bytes == source().scan(other).num_bytes
    assert scan.footer_hash != source().scan(other).footer_hash
