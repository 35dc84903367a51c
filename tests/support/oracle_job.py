"""A job whose sources lie in every format, for tests against the oracle.

In: a seed. Out: files of a source each of token lists, text, text whose ids the index keeps, JSON lines, Arrow and
Megatron's .bin, that lie on disk in ways drawn from the seed; what the oracle reads in them; a recipe with its catalog.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.support import oracle
from tests.support.arrow_files import among_others, write_arrow
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.json_lines import json_lines, write_lines
from torchmix.cli.main import main
from torchmix.constructor.fields import Microbatch

SAMPLES = 8
LENGTH = 96
ALIGN_TOKENS = 8
Documents = dict[str, list[list[int]]]


def write_data(folder: Path, seed: int) -> Documents:
    """Files of seven sources, in a folder, and their documents as the oracle reads them."""
    draw = random.Random(seed)

    def choices() -> dict[str, Any]:
        """How a file lies on disk; none of it may be seen in a tensor."""
        return {
            "codec": draw.choice(["none", "snappy", "zstd", "gzip"]),
            "page_bytes": draw.choice([300, 2000, 50_000]),
            "row_group_rows": draw.choice([60, 400, 10_000]),
            "page_index": draw.random() < 0.5,
            "page_version": draw.choice(["1.0", "2.0"]),
            "dictionary": draw.random() < 0.5,
        }

    def with_nulls(rows: list[Any]) -> list[Any]:
        return [None if draw.random() < 0.03 else row for row in rows]

    for number in range(draw.randint(1, 3)):
        mean_tokens = draw.choice([15, 60, 150])  # some documents are longer than a sample
        documents = random_tokens(seed + number, draw.randint(50, 400), mean_tokens=mean_tokens, vocabulary=50_000)
        element = draw.choice([pa.int32(), pa.int64(), pa.uint16()])
        make_tokens_file(folder / f"web-{number}.parquet", with_nulls(documents), type=pa.list_(element), **choices())
    prose = random_texts(seed + 10, draw.randint(100, 400), mean_words=draw.choice([3, 20]))
    make_text_file(folder / "prose.parquet", with_nulls(prose), **choices())
    make_text_file(folder / "tiny.parquet", ["", "ab", *random_texts(seed + 11, 5)], **choices())
    dtype = draw.choice(["uint16", "int32", "uint8"])
    for number in range(draw.randint(1, 2)):
        sequences = random_sequences(seed + 20 + number, draw.randint(20, 200), mean_tokens=80, dtype=dtype)
        write_dataset(folder / f"code-{number}", [np.abs(tokens) for tokens in sequences], dtype=dtype)
    ending = draw.choice([".jsonl", ".jsonl.gz"])
    chat = json_lines(with_nulls(random_texts(seed + 30, draw.randint(50, 300))), "text", seed)
    write_lines(folder / f"chat{ending}", chat, mean_bytes=draw.choice([50, 5000]), at_lines=draw.random() < 0.5)
    cached = pa.array(
        with_nulls(random_tokens(seed + 31, draw.randint(50, 300))), pa.list_(draw.choice([pa.int32(), pa.int64()]))
    )
    write_arrow(
        folder / "cache.arrow",
        among_others(cached, seed, "ids"),
        stream=True,
        codec=draw.choice([None, "lz4"]),
        batch_rows=draw.choice([10, 1000]),
    )
    make_text_file(folder / "kept.parquet", with_nulls(random_texts(seed + 40, draw.randint(100, 300))), **choices())
    return {
        "cache": oracle.read_arrow_documents([folder / "cache.arrow"], "ids"),
        "chat": oracle.read_line_documents(list(folder.glob("chat*")), "text"),
        "code": oracle.read_indexed_documents(list(folder.glob("code-*.bin"))),
        "kept": oracle.read_text_documents([folder / "kept.parquet"], "text"),
        "web": oracle.read_token_documents(list(folder.glob("web-*.parquet")), "input_ids"),
        "prose": oracle.read_text_documents([folder / "prose.parquet"], "text"),
        "tiny": oracle.read_text_documents([folder / "tiny.parquet"], "text"),
    }


def write_recipe(folder: Path, seed: int, method: str, boundaries: str) -> Path:
    """A recipe over these sources, with its catalog."""
    path = folder / f"{method}-{boundaries}.yaml"
    overflow = random.Random(seed).choice(["split", "truncate", "drop"])
    path.write_text(
        f"""
version: 1
seed: {seed}
batch: {{samples: {SAMPLES}, length: {LENGTH}}}
sources:
  web: {{path: "web-*.parquet", tokens: input_ids}}
  prose: {{path: prose.parquet, text: text, tokenizer: bytes}}
  tiny: {{path: tiny.parquet, text: text, tokenizer: bytes}}
  kept: {{path: kept.parquet, text: text, tokenizer: bytes, keep: tokens}}
  code: {{path: "code-*.idx"}}
  chat: {{path: "chat.jsonl*", format: jsonl, text: text, tokenizer: bytes}}
  cache: {{path: cache.arrow, tokens: ids}}
mixture: {{web: 25%, prose: 20%, tiny: 5%, kept: 10%, code: 20%, chat: 10%, cache: 10%}}
packing: {{method: {method}, overflow: {overflow}, boundaries: {boundaries}, align_tokens: {ALIGN_TOKENS}}}
balance: {{method: rows, model: {{layers: 4, hidden: 64, ffn: 256, heads: 4}}}}
shuffle: {{window_pages: 3, window_bytes: 64KiB}}
"""
    )
    assert main(["index", str(path)]) == 0
    return path


def expected_of_ranks(
    recipe: Path, documents: Documents, job: oracle.Job, *, steps: int, folder: Path
) -> list[list[dict[str, Any]]]:
    """What the oracle says that each rank is handed; the plan's files come into the folder."""
    layout = ["--dp", str(job.dp), "--micro-batch-size", str(job.micro_batch_size)]
    assert main(["plan", str(recipe), "--steps", str(steps), *layout, "--out", str(folder)]) == 0
    return oracle.expected_microbatches(folder / "pieces.parquet", documents, job)


def assert_equal(found: Microbatch, expected: dict[str, Any], where: str) -> None:
    """Compare all fields of a microbatch, with their types."""
    for name, value in expected.items():
        given = getattr(found, name)
        if isinstance(value, np.ndarray):
            assert given is not None, f"{where}: {name} is missing"
            assert given.numpy().dtype == value.dtype, f"{where}: {name}"
            np.testing.assert_array_equal(given.numpy(), value, err_msg=f"{where}: {name}")
        else:
            assert given == value, f"{where}: {name}"
