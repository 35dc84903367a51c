"""WebDataset shards: samples, texts by offset, and shards that are at fault."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.tar_shards import write_shard
from torchmix.errors import CorruptPage, SourceUnreadable, TorchmixError
from torchmix.formats.webdataset.members import members_of, samples_of
from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Shuffle

LONG = "a/" + "long" * 40 + "é"
SAMPLES = [
    ("a/0", {"jpg": bytes(700), "txt": b"hello", "json": json.dumps({"caption": {"en": "eins"}}).encode()}),
    ("a/1", {"txt": b"x" * 512, "seg.png": b"", "json": b'{"caption": {"en": null}}'}),
    ("b.d/0", {"TXT": b"", "json": b'{"caption": {"en": "\\u00e9"}}'}),
    (LONG, {"txt": "größer".encode(), "json": b'{"caption": {"en": "last"}}'}),
]


def recipe_of(path: str, **options: object) -> object:
    source = {"path": path, "tokenizer": "bytes", **options}
    return check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 2, "length": 64},
            "sources": {"web": source},
            "mixture": {"web": "100%"},
        }
    )


def read_all(tmp_path: Path, **options: object) -> list[bytes]:
    """The text of each row, by the index and the reader."""
    catalog = index_recipe(recipe_of("*.tar", **options), tmp_path)
    tokens = catalog.sources["web"].sizes.tokens.astype(np.int64)
    wanted = WantedPieces.end_to_end(source=0, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens)
    reader = Reader(catalog, tmp_path, cache_bytes=1 << 20)
    values = reader.read(wanted).values
    reader.close()
    parts = [values[place : place + count] for place, count in zip(wanted.places, tokens, strict=True)]
    return [bytes(part[:-1].astype(np.uint8)) if len(part) else b"-" for part in parts]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_samples_are_consecutive_members_of_a_key(tmp_path: Path, format: int) -> None:
    write_shard(tmp_path / "0.tar", SAMPLES, format=format)
    content = (tmp_path / "0.tar").read_bytes()
    found = list(samples_of(lambda offset, count: content[offset : offset + count], len(content)))
    assert [sample.key for sample in found] == [key for key, _ in SAMPLES]
    for sample, (_, members) in zip(found, SAMPLES, strict=True):
        held = {s: content[m.offset : m.offset + m.num_bytes] for s, m in sample.members.items()}
        assert held == {suffix.lower(): value for suffix, value in members.items()}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_texts_are_read_by_offset(tmp_path: Path, format: int) -> None:
    write_shard(tmp_path / "0.tar", SAMPLES, format=format)
    write_shard(tmp_path / "1.tar", [("c", {"txt": b"more", "json": b"{}"})], format=format)
    texts = [b"hello", b"x" * 512, b"", "größer".encode(), b"more"]
    assert read_all(tmp_path, text="txt") == texts


def test_a_text_may_lie_in_json(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.tar", SAMPLES)
    assert read_all(tmp_path, text="json.caption.en") == [b"eins", b"-", "é".encode(), b"last"]
    write_shard(tmp_path / "0.tar", [*SAMPLES, ("z", {"json": b'{"caption": 3}'}), ("zz", {"txt": b"no json"})])
    with pytest.raises(SourceUnreadable, match=r"row 4: the member 'z.json': it has no key 'en'"):
        read_all(tmp_path, text="json.caption.en")
    masked = read_all(tmp_path, text="json.caption.en", bad_rows="mask", max_bad="50%")
    assert masked == [b"eins", b"-", "é".encode(), b"last", b"-", b"-"]


def test_shards_at_fault_are_named(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    write_shard(path, SAMPLES)
    whole = path.read_bytes()
    cases = [
        (gzip.compress(whole), SourceUnreadable, "it is compressed, so that members have no offsets"),
        (b"no tar at all " * 100, SourceUnreadable, "it is no tar file"),
        (whole[: 512 + 100], CorruptPage, r"'a/0\.jpg' at byte 0 is cut off: 100 of 700 bytes"),
        (whole[:700], CorruptPage, r"'a/0\.jpg' at byte 0 is cut off"),
        (whole[:1536] + b"\1" * 512 + whole[2048:], CorruptPage, r"has no header of a member at byte 1536, behind"),
    ]
    for content, error, message in cases:
        path.write_bytes(content)
        with pytest.raises(error, match=message):
            read_all(tmp_path, text="txt")
    write_shard(path, [("a", {"txt": b"1", "TXT": b"2"})])
    with pytest.raises(SourceUnreadable, match="stands twice in its sample"):
        read_all(tmp_path, text="txt")


def test_a_shard_that_ends_without_a_mark_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "0.tar"
    write_shard(path, SAMPLES[1:3])
    assert read_all(tmp_path, text="txt") == [b"x" * 512, b""]
    assert "end mark" not in caplog.text
    path.write_bytes(path.read_bytes()[:2560])  # between two samples
    assert read_all(tmp_path, text="txt") == [b"x" * 512]
    assert f"source 'web': {path} ends behind sample 1 without tar's end mark, as one that was cut short" in caplog.text


def test_a_shard_that_was_altered_in_place_is_noticed(tmp_path: Path) -> None:
    # Larger than what is hashed of its ends, so that the checksum of the page must find it.
    filler = [(f"f{i}", {"jpg": bytes(40_000), "txt": b"filler"}) for i in range(4)]
    path = tmp_path / "0.tar"
    write_shard(path, filler)
    index_recipe(recipe_of("*.tar", text="txt"), tmp_path)
    content = path.read_bytes()
    place = content.index(b"filler", 60_000)
    path.write_bytes(content[:place] + b"FILLER" + content[place + 6 :])
    with pytest.raises(TorchmixError):
        read_all(tmp_path, text="txt")


def test_members_of_a_mutated_shard_end_in_time() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as shard:
        for key, members in SAMPLES:
            for suffix, value in members.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(value)
                shard.addfile(member, io.BytesIO(value))
    whole, rng, refused = file.getvalue(), np.random.default_rng(3), 0
    for _ in range(300):
        content = bytearray(whole)
        place = int(rng.integers(len(content)))
        content[place : place + int(rng.integers(1, 30))] = rng.bytes(int(rng.integers(1, 30)))
        try:
            for member in members_of(lambda o, n, held=bytes(content): held[o : o + n], len(content)):
                assert member.offset + member.num_bytes <= len(content)
        except (SourceUnreadable, CorruptPage) as error:
            assert "again" in str(error), "it says what to do"
            refused += 1
    assert refused > 30


def test_a_window_has_64_samples_for_each_page_that_the_recipe_says(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.tar", [(f"s{i}", {"txt": b"some text"}) for i in range(300)])
    recipe = msgspec.structs.replace(recipe_of("*.tar", text="txt"), shuffle=Shuffle(window_pages=3))
    assert index_recipe(recipe, tmp_path).sources["web"].sizes.window_pages == 3 * 64
