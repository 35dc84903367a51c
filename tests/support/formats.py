"""Sources of every format beside each other: the same kinds of documents, in files of each format and compression.

In: a seed. Out: `World`, see catalogs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.support.arrow_files import among_others, write_arrow
from tests.support.catalogs import World, tokens_of
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.json_lines import json_lines, write_lines
from tests.support.recipes import make_recipe

TEXT_SOURCES = ("feather", "gzip", "lines", "parquet")


def write_documents(path: Path, documents: list[Any], seed: int) -> Path:
    """Write documents to a file of the format that its name ends with, as column or key `v`."""
    if path.suffix == ".parquet":
        make = make_text_file if any(isinstance(one, str) for one in documents) else make_tokens_file
        return make(path, documents, column="v")
    if path.suffix in (".arrow", ".feather"):
        held_type = pa.string() if any(isinstance(one, str) for one in documents) else pa.list_(pa.int32())
        table = among_others(pa.array(documents, held_type), seed)
        codec = "zstd" if path.suffix == ".feather" else None
        return write_arrow(path, table, stream=path.suffix == ".arrow", codec=codec, batch_rows=70)
    return write_lines(path, json_lines(documents, "v", seed), mean_bytes=3000, at_lines=seed % 2 == 0, seed=seed)


def format_world(directory: Path, seed: int, *, num_documents: int = 250, **options: Any) -> World:
    """Two files of each of seven sources; every tenth document or so is null."""
    suffixes = {
        "feather": ".feather",
        "gzip": ".jsonl.gz",
        "lines": ".jsonl",
        "numbers": ".ndjson",
        "parquet": ".parquet",
        "stream": ".arrow",
        "zstd": ".json.zst",
    }
    keys, documents = {}, {}
    for i, (name, suffix) in enumerate(suffixes.items()):
        is_text = name in TEXT_SOURCES
        make: Any = random_texts if is_text else random_tokens
        documents[name] = []
        for number in range(2):
            rows = [None if k % 11 == 5 else one for k, one in enumerate(make(seed + 2 * i + number, num_documents))]
            write_documents(directory / name / f"{number}{suffix}", rows, seed + number)
            documents[name] += [tokens_of(row) for row in rows]
        columns = {"text": "v", "tokenizer": "bytes", "tokens": None} if is_text else {"tokens": "v"}
        keys[name] = {"path": f"{name}/*{suffix}", **columns}
    shares = dict.fromkeys(suffixes, "14%") | {"zstd": "16%"}
    recipe = make_recipe(shares, sources=keys, **options)
    return World(directory=directory, recipe=recipe, documents=documents)
