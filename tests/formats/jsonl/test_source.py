from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.files import random_texts, random_tokens
from tests.support.json_lines import frame_of, framed, json_lines, plain_lines, write_lines
from tests.support.pages import as_lists, documents_by_page, page_runs
from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.jsonl import lines as jsonl_pages
from torchmix.formats.jsonl.source import JsonLinesSource
from torchmix.storage.random_access import LocalFile

SUFFIXES = ("", ".gz", ".zst")


def source(kind: str = "text", column: str = "text") -> JsonLinesSource:
    return JsonLinesSource(name="web", column=column, kind=kind)


def expected(documents: list, kind: str) -> list[list[int]]:
    return [[] if one is None else [*one.encode(), 256] if kind == "text" else one for one in documents]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_documents_read_by_page_are_those_of_the_file(tmp_path, seed, suffix, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", rng.choice([64, 500, 4096]))
    kind = rng.choice(["text", "tokens"])
    documents = (random_texts if kind == "text" else random_tokens)(seed, rng.randint(0, 200))
    documents = [None if rng.random() < 0.1 else one for one in documents]
    content = b"\xef\xbb\xbf" * (seed % 2) + json_lines(documents, seed=seed)
    choices = {"mean_bytes": rng.choice([10, 300, 5000]), "at_lines": rng.random() < 0.5, "seed": seed}
    path = write_lines(tmp_path / f"x.jsonl{suffix}", content, **choices)
    own = source(kind)
    own.check(path)
    told: list[int] = []
    scan = own.scan(path, progress=told.append)
    assert scan.num_rows == len(documents) == scan.page_rows.sum()
    assert scan.tokens.tolist() == [len(tokens) for tokens in expected(documents, kind)]
    for most_pages in (1, 3, 1000):
        assert documents_by_page(own, path, scan, most_pages=most_pages) == expected(documents, kind)
    assert sum(told) >= scan.page_bytes.sum()
    file = LocalFile(path)
    assert own.fingerprint(file, str(path)) == (scan.num_bytes, scan.footer_hash)
    file.close()


def test_pages_of_64_kib_follow_from_places_in_the_file(tmp_path):
    texts = ["x" * 1000] * 400
    path = write_lines(tmp_path / "x.jsonl", plain_lines(texts))
    scan = source().scan(path)
    line = len(plain_lines(texts[:1]))
    assert scan.page_rows.tolist()[:-1] == [-(-(65536 * (i + 1)) // line) - -(-65536 * i // line) for i in range(6)]
    assert scan.kind.tolist() == [0] and scan.companion_offset is None
    assert scan.page_bytes.sum() == path.stat().st_size


def test_pages_whose_frames_end_with_lines_share_a_chunk_and_others_have_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", 500)
    content = plain_lines(random_texts(1, 200))
    aligned = source().scan(write_lines(tmp_path / "a.jsonl.zst", content, mean_bytes=300, at_lines=True))
    assert len(aligned.kind) == 1 and len(aligned.page_rows) > 10
    other = source().scan(write_lines(tmp_path / "b.jsonl.zst", content, mean_bytes=300, at_lines=False))
    assert len(other.kind) == len(other.page_rows) > 10
    assert (np.diff(other.chunk_of_page) == 1).all()


def test_a_column_may_lie_in_an_object(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"data":{"ids":[1,2]}}\n{"data":null}\n{"data":{"ids":[3]}}\n')
    own = source("tokens", "data.ids")
    assert documents_by_page(own, path, own.scan(path)) == [[1, 2], [], [3]]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        (b'{"text":"a"', CorruptPage, "Input data was truncated; mend the line, or take it out"),
        (
            b'{"txt":"a"}',
            SourceUnreadable,
            r"Object missing required field `text`; it has the keys txt \(did you mean 'txt'\?\); mend the line, or",
        ),
        (b'{"text":[1]}', SourceUnreadable, r"Expected `str \| null`, got `array` - at `\$.text`"),
    ],
    ids=["cut", "missing", "type"],
)
def test_a_line_at_fault_is_named_with_file_line_and_byte(tmp_path, suffix, line, kind, says, monkeypatch):
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", 100)
    before = b"\n" + plain_lines(random_texts(3, 70))
    content = before + line + b"\n" + plain_lines(["z"])
    path = write_lines(tmp_path / f"x.jsonl{suffix}", content, mean_bytes=200)
    number = len(before.split(b"\n"))
    where = rf"source 'web': .*x\.jsonl{suffix}: line {number}, at byte {len(before)}: "
    with pytest.raises(kind, match=where + says):
        source().scan(path)
    source().check(path)  # it looks at the first page alone
    path.write_bytes(framed(line, path.suffix, mean_bytes=10, at_lines=True))
    with pytest.raises(kind, match="line 1, at byte 0: "):
        source().check(path)


def test_a_file_that_is_missing_or_of_another_kind_is_named(tmp_path):
    for look in (source().scan, source().check):
        with pytest.raises(SourceUnreadable, match=r"source 'web': .*x\.jsonl: cannot be opened: No such file"):
            look(tmp_path / "x.jsonl")
        (tmp_path / "folder.jsonl").mkdir(exist_ok=True)
        with pytest.raises(SourceUnreadable, match=r"folder\.jsonl: cannot be read: Is a directory"):
            look(tmp_path / "folder.jsonl")
        (tmp_path / "y.jsonl.gz").write_bytes(b'{"text":"a"}\n')
        with pytest.raises(CorruptPage, match=r"y\.jsonl\.gz: no whole gzip frame at byte 0"):
            look(tmp_path / "y.jsonl.gz")
        (tmp_path / "y.json").write_bytes(b'[\n{"text":"a"},\n')
        with pytest.raises(SourceUnreadable, match=r"y\.json: line 1, at byte 0: .* one JSON array is not read"):
            look(tmp_path / "y.json")


def test_the_identity_covers_size_beginning_and_end(tmp_path):
    def identity(content: bytes) -> tuple[int, str]:
        path = tmp_path / "x.jsonl"
        path.write_bytes(content)
        file = LocalFile(path)
        try:
            return source().fingerprint(file, str(path))
        finally:
            file.close()

    content = plain_lines(random_texts(5, 4000))
    assert len(content) > 100_000
    same = identity(content)
    assert identity(content) == same
    assert identity(b"x" + content[1:]) != same != identity(content[:-2] + b"x\n")
    assert identity(content + b"\n") != same
    assert identity(b"") == (0, "e3b0c44298fc1c149afbf4c8996fb924")  # SHA-256 of nothing


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_page_that_was_damaged_is_an_error_or_reads_as_before(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", 200)
    path = write_lines(tmp_path / f"x.jsonl{suffix}", plain_lines(random_texts(8, 20)), mean_bytes=200, at_lines=False)
    own = source()
    num_wrong = num_bytes = 0
    for run in page_runs(path, own.scan(path)):
        sound = as_lists(own.decode([run])[0])
        num_bytes += len(run.pages)
        for i in range(len(run.pages)):
            damaged = bytearray(run.pages)
            damaged[i] ^= 0x24
            try:
                num_wrong += as_lists(own.decode([replace(run, pages=bytes(damaged))])[0]) != sound
            except CorruptPage as error:
                assert f"{path}: the page at bytes [{run.offset}, {run.offset + len(run.pages)})" in str(error)
    # gzip's members have checksums; these frames of zstd have none, and altered letters are letters
    assert num_wrong == 0 if suffix == ".gz" else 0 < num_wrong < 0.7 * num_bytes


def test_a_page_cut_short_is_an_error_that_names_file_page_and_rows(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", plain_lines(["a", "b"]))
    own = source()
    scan = own.scan(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        CorruptPage, match=r"x\.jsonl: the page at bytes \[0, 25\), within rows \[0, 2\), does not decode"
    ):
        own.decode([next(page_runs(path, scan))])


def test_one_small_frame_is_a_page_and_a_large_one_is_refused_with_the_command(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(frame_of(plain_lines(["abc"] * 10_000), ".zst"))
    assert source().scan(path).page_rows.tolist() == [10_000]
    monkeypatch.setattr("torchmix.formats.jsonl.frames.MOST_FRAME_BYTES", 100_000)
    with pytest.raises(SourceUnreadable, match=r"x\.jsonl\.zst: the zstd frame at byte 0 .*torchmix reframe IN OUT"):
        source().scan(path)
