"""Tokenizing: what an index run and a read of text cost beside the tokenizer's own library.

    python benchmarks/tokenizing.py [--megabytes 12] [--vocabulary 16000] [--rounds 3]

Text is the source of Python's standard library, cut into documents of some kilobytes, in four Parquet files of zstd
with pages of 256 KB. A byte-level BPE is trained on a part of it, and the same merges make an encoding of tiktoken. The
bound is the library alone, on Python strings in memory: `encode_batch` of tokenizers, `encode_ordinary_batch` of
tiktoken, with as many threads as there are processors. All are taken in turn in one process; times are CPU seconds of
all threads, and wall seconds. `index` finds the pages and counts the tokens of every row; `read` asks for the rows in a
random order, 256 at a time, so that each is tokenized once more and its ids come to their places, as in training.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
import tiktoken.registry
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from torchmix.catalog.store import Catalog
from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Batch, Recipe, Source

END = "<|endoftext|>"
ROWS_OF_STEP = 256
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def texts_of_machine(num_bytes: int) -> list[str]:
    texts: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for start in range(0, len(text), 4000):
            texts.append(text[start : start + 4000])
            total += len(texts[-1])
        if total > num_bytes:
            break
    return texts


def train(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts[::4],
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[END], show_progress=False, initial_alphabet=alphabet
        ),
    )
    return tokenizer


def install_encoding(tokenizer: Tokenizer) -> tiktoken.Encoding:
    """The same vocabulary as an encoding of tiktoken, by the name `same`."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that the byte level writes as they are
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    ranks = {
        bytes(byte_of[character] for character in token): number
        for token, number in tokenizer.get_vocab().items()
        if token != END
    }
    content = {"name": "same", "pat_str": GPT2_PATTERN, "mergeable_ranks": ranks, "special_tokens": {END: 0}}
    tiktoken.list_encoding_names()
    assert tiktoken.registry.ENCODING_CONSTRUCTORS is not None
    tiktoken.registry.ENCODING_CONSTRUCTORS["same"] = lambda: content
    return tiktoken.get_encoding("same")


def read_all(catalog: Catalog, folder: Path) -> int:
    source = catalog.sources["text"]
    reader = Reader(catalog, folder, cache_bytes=1 << 30)
    lengths = source.sizes.tokens.astype(np.int64)
    order = np.random.default_rng(1).permutation(len(lengths))
    for rows in np.array_split(order, 1 + len(order) // ROWS_OF_STEP):
        reader.read(WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=lengths[rows]))
    assert reader.stats()["rows_encoded"] == len(lengths)
    reader.close()
    return int(lengths.sum())


def timed(call: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = texts_of_machine(options.megabytes * 10**6)
    tokenizer = train(texts, options.vocabulary)
    encoding = install_encoding(tokenizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(str(folder / "t.json"))
        for part in range(4):
            table = pa.table({"text": texts[part::4]})
            pq.write_table(
                table,
                folder / f"{part}.parquet",
                compression="zstd",
                data_page_size=1 << 18,
                row_group_size=2000,
                use_dictionary=False,
                write_page_index=True,
            )
        libraries: dict[str, Callable[[], object]] = {
            "t.json": lambda: [
                len(e) for i in range(0, len(texts), 256) for e in tokenizer.encode_batch(texts[i : i + 256])
            ],
            "tiktoken:same": lambda: [
                len(ids)
                for i in range(0, len(texts), 256)
                for ids in encoding.encode_ordinary_batch(texts[i : i + 256], num_threads=os.cpu_count() or 1)
            ],
        }
        num_bytes = sum(len(text.encode()) for text in texts)
        print(f"{len(texts):,} documents, {num_bytes / 1e6:.1f} MB, median of {options.rounds} rounds\n")
        print(
            "library | its million tokens a CPU-second | index: find pages, count tokens of all rows | "
            "read: all rows in random order, 256 at a time"
        )
        for words, library in libraries.items():
            source = Source(path="*.parquet", text="text", tokenizer=words, end_id=END)
            recipe = check_recipe(
                Recipe(
                    version=1,
                    seed=1,
                    batch=Batch(samples=1, length=8),
                    sources={"text": source},
                    mixture={"text": "100%"},
                )
            )
            rounds = []
            for _ in range(options.rounds):
                bare = timed(library)
                index = timed(lambda recipe=recipe: index_recipe(recipe, folder, force=True))
                catalog = index_recipe(recipe, folder)
                read = timed(lambda catalog=catalog: read_all(catalog, folder))
                rounds.append([*bare, *index, *read])
            bare_cpu, _, index_cpu, _, read_cpu, _ = np.median(np.array(rounds), axis=0)
            num_tokens = catalog.sources["text"].num_tokens
            package = "tiktoken" if words.startswith("tiktoken") else "tokenizers"
            print(
                f"{package} {version(package)} | {num_tokens / bare_cpu / 1e6:.2f} | {index_cpu / bare_cpu:.2f} | "
                f"{read_cpu / bare_cpu:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
