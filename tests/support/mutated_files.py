"""Files of every format, changes to their bytes, and what a reader without torchmix says of them.

In: a folder; a file's bytes and places. Out: `Base` files, changed bytes, rows as lists of ids. Must hold: rows are
found by pyarrow, json, zlib and numpy alone; changes follow from a random generator alone.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.arrow_files import among_others, token_dictionary, write_arrow
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.indexed_datasets import HEADER, MAGIC, write_dataset
from tests.support.json_lines import json_lines, write_lines
from tests.support.split_rows import make_split_file
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT

Rows = list[list[int]]
OTHER_WRITERS = sorted((Path(__file__).parents[1] / "formats" / "files").glob("*.parquet"))
FOOTER_BYTES = 8


class Refused(Exception):
    """The reader does not read the file."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A file before it is changed."""

    path: Path
    column: str
    is_text: bool
    format: str

    @property
    def parts(self) -> list[Path]:
        """Its files: of a dataset of Megatron's two."""
        return [self.path, self.path.with_suffix(".idx")] if self.format == "megatron" else [self.path]

    @property
    def keys(self) -> dict[str, Any]:
        """What a source of a recipe says of this file."""
        if self.format == "megatron":
            return {"path": self.path.with_suffix("").name, "format": "megatron", "tokens": None}
        own = {"text": self.column, "tokens": None, "tokenizer": "bytes"} if self.is_text else {"tokens": self.column}
        return {"path": self.path.name, "format": self.format, **own}


def make_bases(folder: Path) -> list[Base]:
    """A small file of each kind, in a folder of its own."""
    bases: list[Base] = []

    def add(name: str, make: Callable[[Path], Path], column: str, is_text: bool, format: str) -> None:
        path = folder / str(len(bases)) / name
        path.parent.mkdir(parents=True)
        bases.append(Base(path=make(path), column=column, is_text=is_text, format=format))

    ids, texts = random_tokens(1, 150), random_texts(2, 150)
    equal = np.random.default_rng(3).integers(0, 60_000, (120, 24)).tolist()
    for i, codec in enumerate(("none", "snappy", "gzip", "brotli", "zstd", "lz4")):
        for checksums in (False, True):
            kind: dict[str, Any] = {"codec": codec, "checksums": checksums, "page_bytes": 400, "row_group_rows": 70}
            kind |= {"page_index": i % 2 == 0, "page_version": "2.0" if i % 3 == 1 else "1.0"}
            rows, dictionary = (equal, False) if i % 2 == 0 else (ids, True)
            add(
                f"ids-{codec}-{checksums}.parquet",
                lambda path, rows=rows, kind=kind, dictionary=dictionary: make_tokens_file(
                    path, rows, dictionary=dictionary, **kind
                ),
                "input_ids",
                False,
                "parquet",
            )
        add(
            f"text-{codec}.parquet",
            lambda path, kind=kind, i=i: make_text_file(path, [*texts, None], dictionary=i % 2 == 0, **kind),
            "text",
            True,
            "parquet",
        )
        add(
            f"split-{codec}.parquet",
            lambda path, codec=codec, i=i: make_split_file(
                path,
                ids,
                page_values=(5, 60)[i % 2],
                codec="lz4_raw" if codec == "lz4" else codec,
                page_version=1 + i % 2,
                dictionary=i % 3 == 0,
            ),
            "input_ids",
            False,
            "parquet",
        )
    for other in OTHER_WRITERS:
        is_text = other.stem == "fastparquet"
        column = "text" if is_text else "ids"
        add(other.name, lambda path, other=other: _copy(other, path), column, is_text, "parquet")
    for codec in (None, "lz4", "zstd"):
        for stream in (False, True):
            for name, column in (
                ("ids", pa.array([*ids, None], pa.list_(pa.int32()))),
                ("text", pa.array([*texts, None], pa.string())),
                ("large", pa.array(ids, pa.large_list(pa.uint16()))),
                ("fixed", pa.array(equal, pa.list_(pa.int32(), 24))),
                ("dictionary", token_dictionary(ids)),
            ):
                add(
                    f"{name}-{codec}-{stream}.arrow",
                    lambda path, column=column, stream=stream, codec=codec: write_arrow(
                        path, among_others(column, 5), stream=stream, codec=codec, batch_rows=60
                    ),
                    "v",
                    name == "text",
                    "arrow",
                )
    for suffix in ("", ".gz", ".zst"):
        for at_lines in (True, False):
            for name, documents in (("ids", [*ids, None]), ("text", [*texts, "\ud83d", None]), ("equal", equal)):
                add(
                    f"{name}-{at_lines}.jsonl{suffix}",
                    lambda path, documents=documents, at_lines=at_lines: write_lines(
                        path, json_lines(documents, "v", 4), mean_bytes=900, at_lines=at_lines
                    ),
                    "v",
                    name == "text",
                    "jsonl",
                )
    for count in (80, 4000):  # of the second the fingerprint covers samples alone
        sequences = [np.array(one, np.uint16) for one in random_tokens(6, count, mean_tokens=30)]
        borders = [0, *range(2, count, 3), count]
        for name, documents in (("plain", None), ("joined", borders)):
            add(
                f"{name}-{count}.bin",
                lambda path, sequences=sequences, documents=documents: write_dataset(
                    path.with_suffix(""), sequences, documents=documents
                ),
                "",
                False,
                "megatron",
            )
    return bases


def _copy(source: Path, target: Path) -> Path:
    target.write_bytes(source.read_bytes())
    return target


def change(content: bytes, pages: Sequence[tuple[int, int]], chance: random.Random) -> tuple[bytes, str]:
    """Other bytes, and what was done; `pages` are offset and size of each."""
    out, done = bytearray(content), []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if not out:
            break
        kind = chance.choice(["bits", "byte", "header", "region", "copied", "moved", "swapped", "swapped", "length"])
        done.append(kind)
        offset, size = chance.choice(pages) if pages and chance.random() < 0.7 else (0, len(out))
        size = min(size, len(out) - offset)
        if size < 1:
            continue
        at = offset + chance.randrange(min(size, 60) if kind == "header" else size)
        span = min(chance.choice([1, 2, 4, 8, 40, 300]), len(out) - at)
        if kind == "bits":
            out[at] ^= 1 << chance.randrange(8)
        elif kind in ("byte", "header"):
            out[at] = chance.choice([0, 1, 0x12, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        elif kind == "region":
            out[at : at + span] = chance.choice([bytes(span), b"\xff" * span, chance.randbytes(span)])
        elif kind == "copied":
            start = chance.randrange(len(out) - span + 1)
            out[at : at + span] = out[start : start + span]
        elif kind == "moved" and len(pages) > 1:
            start, count = chance.choice(pages)
            count = min(count, size)
            out[offset : offset + count] = out[start : start + count]
        elif kind == "swapped" and len(pages) > 1:
            _swap(out, pages, chance)
        elif kind == "length":
            cut = chance.randrange(3)
            if cut == 0:
                del out[at:]
            elif cut == 1:
                del out[at : at + span]
            else:
                out[at:at] = chance.randbytes(span)
    return bytes(out), ", ".join(done)


def _swap(out: bytearray, pages: Sequence[tuple[int, int]], chance: random.Random) -> None:
    """Two pages change places: two of one size where there are such, else neighbours or any, with what lies between."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for page in pages:
        by_size.setdefault(page[1], []).append(page)
    equal = [group for group in by_size.values() if len(group) > 1]
    (a, first), (b, second) = sorted(chance.sample(chance.choice(equal) if equal else list(pages), 2))
    if a + first <= b and b + second <= len(out):
        out[a : b + second] = out[b : b + second] + out[a + first : b] + out[a : a + first]


def rows_of(base: Base) -> Rows:
    """All rows, without torchmix.

    Raises:
        Refused: The reader does not read the file.
    """
    try:
        found = {"parquet": _parquet, "arrow": _arrow, "jsonl": _lines, "megatron": _dataset}[base.format](base)
        return [_ids(row) for row in found]
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, EOFError, OverflowError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from None
    except (zlib.error, RecursionError, struct.error, AttributeError, MemoryError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from None


def _ids(row: Any) -> list[int]:
    if row is None:
        return []
    if isinstance(row, str):
        return [*re.sub("[\ud800-\udfff]", "�", row).encode(), END_OF_DOCUMENT]
    if isinstance(row, bytes):
        return [*row, END_OF_DOCUMENT]
    if any(type(token) is not int for token in row):
        raise ValueError("a token is no integer")
    return list(row)


def _parquet(base: Base) -> list[Any]:
    file = pq.ParquetFile(base.path, pre_buffer=False)
    column = file.read(columns=[base.column], use_threads=False).column(0)
    column.validate(full=False)
    return list(column.cast(pa.large_binary()).to_pylist() if base.is_text else column.to_pylist())


def _arrow(base: Base) -> list[Any]:
    content = pa.py_buffer(base.path.read_bytes())
    is_file = content[:6].to_pybytes() == b"ARROW1"
    reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(content)
    place = reader.schema.get_field_index(base.column)
    if place < 0:
        raise ValueError("no such column")
    options = pa.ipc.IpcReadOptions(included_fields=[place], use_threads=False)
    reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(content, options=options)
    column = reader.read_all().column(0)
    for chunk in column.chunks:
        chunk.validate(full=not base.is_text)
    rows: list[Any] = []
    for chunk in column.chunks:
        if base.is_text:
            chunk.validate()
            if chunk.type != pa.string():
                raise ValueError("no text")
            binary = chunk.view(pa.binary())
            binary.validate(full=True)
            chunk = binary
        rows += chunk.to_pylist()
    return rows


def _lines(base: Base) -> list[Any]:
    content = base.path.read_bytes()
    if base.path.suffix == ".gz":
        content = gzip.decompress(content)
    elif base.path.suffix == ".zst":
        with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
            content = stream.read()
    if content.startswith(b"\xef\xbb\xbf"):
        content = content[3:]
    rows = []
    for line in content.split(b"\n"):
        if line.strip(b" \t\r"):
            row = json.loads(line.decode("utf-8", "surrogateescape"))[base.column]
            if row is not None and isinstance(row, str) != base.is_text:
                raise ValueError("of another type")
            rows.append(row)
    return rows


def _dataset(base: Base) -> list[Any]:
    """By the layout alone, https://github.com/NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py"""
    index = base.path.with_suffix(".idx").read_bytes()
    magic, version, code, num_sequences, num_borders = HEADER.unpack_from(index)
    dtype = np.dtype({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code])
    if magic != MAGIC or version != 1 or max(num_sequences, num_borders) > len(index):
        raise ValueError("no index")
    place = HEADER.size
    lengths = np.frombuffer(index, "<i4", num_sequences, place)
    pointers = np.frombuffer(index, "<i8", num_sequences, place + 4 * num_sequences)
    borders = np.frombuffer(index, "<i8", num_borders, place + 12 * num_sequences)
    content = base.path.read_bytes()
    sequences = []
    for length, pointer in zip(lengths.tolist(), pointers.tolist(), strict=True):
        if not length:
            sequences.append([])
            continue
        if length < 0 or pointer < 0:
            raise ValueError("negative")
        sequences.append(np.frombuffer(content, dtype, length, pointer).tolist())
    rows = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if not 0 <= start <= stop <= num_sequences:
            raise ValueError("borders")
        rows.append([token for sequence in sequences[start:stop] for token in sequence])
    return rows
