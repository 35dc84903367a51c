"""Indexes of DALI and Energon beside shards: the same catalog with fewer reads, and one of another file is refused."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.webdataset.test_webdataset import recipe_of
from tests.support.tar_shards import write_shard
from torchmix.catalog.settings import settings_of
from torchmix.errors import SourceUnreadable
from torchmix.formats.source import FileScan
from torchmix.formats.table import choose_source
from torchmix.formats.webdataset import source as module
from torchmix.transform.open_tokenizer import Tokenizers

SAMPLES = [
    (f"{'a/' if i % 2 else ''}{i:03}", {"jpg": bytes(900), "seg.png": b"x" * i, "txt": b"text %d" % i})
    for i in range(40)
]
LONGER = [(key, {**members, "txt": members["txt"] * (200 if key.endswith("20") else 1)}) for key, members in SAMPLES]


def dali(shard: Path, *, version: str = "v1.2") -> Path:
    """An index as `wds2idx` writes it."""
    lines: dict[str, list[str]] = {}
    with tarfile.open(shard) as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            words = [suffix, member.offset_data, member.size, *([member.name] if version == "v1.2" else [])]
            lines.setdefault(key, []).append(" ".join(map(str, words)))
    path = shard.with_suffix(".idx")
    path.write_text("\n".join([f"{version} {len(lines)}", *(" ".join(words) for words in lines.values())]) + "\n")
    return path


def energon(shards: list[Path]) -> Path:
    """An index as `energon prepare` writes it, and the list of shards."""
    folder = shards[0].parent / ".nv-meta"
    folder.mkdir(exist_ok=True)
    (folder / ".info.json").write_text(json.dumps({"shard_counts": {shard.name: 1 for shard in shards}}))
    path = folder / "index.sqlite"
    path.unlink(missing_ok=True)
    tables = sqlite3.connect(path)
    tables.execute("CREATE TABLE samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size)")
    tables.execute(
        "CREATE TABLE sample_parts (tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)"
    )
    for number, shard in enumerate(shards):
        seen: dict[str, int] = {}
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                if key not in seen:
                    seen[key] = len(seen)
                    tables.execute("INSERT INTO samples VALUES (?, ?, ?, 0, 0)", (number, key, seen[key]))
                row = (number, seen[key], suffix, member.offset_data, member.size)
                tables.execute("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", row)
    tables.commit()
    tables.close()
    return path


def scan(folder: Path, shard: str) -> FileScan:
    recipe: Any = recipe_of("*.tar", text="txt")
    [(name, settings)] = settings_of(recipe.sources, recipe.shuffle).items()
    return choose_source(name, settings, [shard], Tokenizers(folder)).scan(folder / shard)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a shard."""
    counts: list[int] = []
    opened = module.opened

    class Counted:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def read(self, offset: int, num_bytes: int) -> Any:
            counts.append(num_bytes)
            return self._file.read(offset, num_bytes)

    @contextmanager
    def counted(*arguments: Any) -> Iterator[Counted]:
        with opened(*arguments) as file:
            yield Counted(file)

    monkeypatch.setattr(module, "opened", counted)
    return counts


@pytest.mark.parametrize("kind", ["v1.1", "v1.2", "energon"])
def test_an_index_beside_a_shard_saves_its_headers(tmp_path: Path, kind: str, reads: list[int]) -> None:
    shards = [tmp_path / "0.tar", tmp_path / "1.tar"]
    for number, shard in enumerate(shards):
        write_shard(shard, SAMPLES[number:])
    plain = [scan(tmp_path, shard.name) for shard in shards]
    before = len(reads)
    if kind == "energon":
        energon(shards)
    else:
        for shard in shards:
            dali(shard, version=kind)
    found = [scan(tmp_path, shard.name) for shard in shards]
    for one, other in zip(found, plain, strict=True):
        for name in ("page_offset", "page_bytes", "page_crc", "tokens", "page_rows"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert 0 < len(reads) - before < before / 3, "headers of members that are not read stay unread"


@pytest.mark.parametrize("kind", ["v1.1", "v1.2", "energon"])
def test_an_index_of_another_file_is_refused(tmp_path: Path, kind: str) -> None:
    shard = tmp_path / "0.tar"

    def indexed() -> None:
        if kind == "energon":
            energon([shard])
        else:
            dali(shard, version=kind)

    others: list[Any] = [
        SAMPLES[:-1],
        [*SAMPLES, ("last", {"txt": b"more"})],
        [
            (key, members | {"txt": members["txt"] * 200} if i == 20 else members)
            for i, (key, members) in enumerate(SAMPLES)
        ],
        [(key, {"txt": members["txt"]} | members) for key, members in SAMPLES],
    ]
    for other in others:
        write_shard(shard, SAMPLES)
        indexed()
        write_shard(shard, other)
        with pytest.raises(SourceUnreadable, match=r"the index .*(0\.idx|index\.sqlite) beside it is of another file"):
            scan(tmp_path, "0.tar")


@pytest.mark.parametrize(
    "content", ["", "v9 3\n", "v1.2 2\ntxt 512 3 0.txt\n", "v1.2 1\ntxt 512 3\n", "v1.2 1\ntxt a 3 0.txt\n"]
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    write_shard(tmp_path / "0.tar", SAMPLES)
    (tmp_path / "0.idx").write_text(content)
    with pytest.raises(SourceUnreadable, match=r"the index .*0\.idx beside it does not read"):
        scan(tmp_path, "0.tar")
    (tmp_path / "0.idx").unlink()
    energon([tmp_path / "0.tar"]).write_bytes(b"no database at all, but long enough to be looked at" * 20)
    with pytest.raises(SourceUnreadable, match=r"the index .*index\.sqlite does not read"):
        scan(tmp_path, "0.tar")


def test_an_index_that_has_no_such_shard_is_passed_over(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.tar", SAMPLES)
    write_shard(tmp_path / "1.tar", SAMPLES)
    energon([tmp_path / "1.tar"])
    assert scan(tmp_path, "0.tar").num_rows == len(SAMPLES)
