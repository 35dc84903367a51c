"""Kept ids: rows of text whose ids the index kept, beside the same ids in a .bin, and beside the text itself.

    python benchmarks/kept_ids.py [--megabytes 64] [--steps 200] [--rounds 5]

Text is the source of Python's standard library, again and again, in documents of 3,000 bytes, in a Parquet file of
zstd. Its ids are its bytes, in 2 bytes each. A step asks for 256 whole documents, chosen at random. The three readers
read the same steps in turn, in one process; figures are CPU nanoseconds a token, the median of the rounds. The first
round also compares checksums of the pages of kept ids and is left out.
"""

from __future__ import annotations

import argparse
import struct
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Batch, Recipe, Source

DOCUMENT_BYTES, ROWS_OF_STEP = 3000, 256


def texts_of_machine(num_bytes: int) -> list[str]:
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    content = b"".join(path.read_bytes() for path in paths if path.is_file())
    content = content.decode("ascii", errors="ignore").encode()
    content *= 1 + num_bytes // len(content)
    return [content[at : at + DOCUMENT_BYTES].decode() for at in range(0, num_bytes, DOCUMENT_BYTES)]


def write_files(folder: Path, texts: list[str]) -> None:
    pq.write_table(
        pa.table({"text": texts}),
        folder / "text.parquet",
        compression="zstd",
        use_dictionary=False,
        row_group_size=4096,
    )
    ids = [np.append(np.frombuffer(text.encode(), np.uint8).astype(np.uint16), np.uint16(256)) for text in texts]
    with (folder / "ids.bin").open("wb") as file:
        for each in ids:
            file.write(each.tobytes())
    lengths = np.array(list(map(len, ids)), np.int32)
    pointers = np.zeros(len(ids), np.int64)
    np.cumsum(2 * lengths[:-1], out=pointers[1:])
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(ids), len(ids) + 1)
    (folder / "ids.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + np.arange(len(ids) + 1).tobytes())


def recipe_of(**source: object) -> Recipe:
    return check_recipe(
        Recipe(
            version=1,
            seed=1,
            batch=Batch(samples=1, length=8),
            sources={"one": Source(**source)},  # type: ignore[arg-type]
            mixture={"one": "100%"},
            catalog=f"catalog-{len(source)}-{source.get('keep')}",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, texts_of_machine(options.megabytes * 10**6))
        text = {"path": "text.parquet", "text": "text", "tokenizer": "bytes"}
        recipes = {
            "text": recipe_of(**text),
            "kept": recipe_of(**text, keep="tokens"),
            ".bin": recipe_of(path="ids.bin"),
        }
        catalogs = {kind: index_recipe(recipe, folder) for kind, recipe in recipes.items()}
        readers = {kind: Reader(catalog, folder, cache_bytes=1 << 30) for kind, catalog in catalogs.items()}
        lengths = catalogs["text"].sources["one"].sizes.tokens.astype(np.int64)
        steps = np.random.default_rng(1).integers(0, len(lengths), (options.steps, ROWS_OF_STEP))
        found: dict[str, list[float]] = {kind: [] for kind in readers}
        sums: set[int] = set()
        for _ in range(options.rounds + 1):
            for kind, reader in readers.items():
                began, num_tokens, total = time.process_time(), 0, 0
                for rows in steps:
                    wanted = WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=lengths[rows])
                    read = reader.read(wanted)
                    num_tokens += wanted.num_places
                    total += int(read.values[0]) + int(read.values[-2])
                found[kind].append((time.process_time() - began) / num_tokens * 1e9)
                sums.add(total)
        assert len(sums) == 1, "all give the same ids"
        nanoseconds = {kind: float(np.median(rounds[1:])) for kind, rounds in found.items()}
        for kind, value in nanoseconds.items():
            rounds = found[kind][1:]
            print(f"{kind}: {value:.2f} ns a token ({min(rounds):.2f} to {max(rounds):.2f})")
        print(f"kept ids: {nanoseconds['.bin'] / nanoseconds['kept']:.2f} of the speed of a .bin")
        for reader in readers.values():
            reader.close()


if __name__ == "__main__":
    main()
