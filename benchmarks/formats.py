"""JSON lines and Arrow files: tokens per CPU-second, and what comes before the first batch, by reader, in one run.

    python benchmarks/formats.py [--tokens 8000000] [--rounds 5] [--quick]

Files share 8 million tokens, in documents of 800 on average, or four times as many letters. Readers give batches of
262,144 tokens (int64), or of four times as many letters (uint8), documents laid end to end and cut; each is a process
of its own, all of a case run at once and are asked in turn for some batches, so that they meet the same machine. The
page cache is warm.

  torchmix   `torchmix.open_pages`, rows in permuted order: windows of 4 MiB, cache for two of them
  json       Python's parser on each line, of files in random order, compressed ones through pyarrow's zstd
  pyarrow    whole files in random order, one thread, this column alone: `pyarrow.json.read_json`, or `read_feather`,
             and for an Arrow stream, which that does not read, `pyarrow.ipc.open_stream` over mapped memory

Only torchmix shuffles rows. Figures are of CPU time of the process and all its threads: those of the rounds are medians
of ratios within a round. *First* is from the end of imports to the first batch, *cold* without torchmix's index and
*warm* with it, over the time that `pyarrow` takes for all files once; it is taken before the rounds, one after another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent))
from process_trees import Contestant, reply, requests

BATCH = 1 << 18
MEAN = 800
LETTERS = 4
"""Of text, for each token of the other files."""
WINDOW_BYTES = 4 << 20
ROWS_A_CALL = 256
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "that",
    "is",
    "he",
    "was",
    "for",
    'said "yes"\n',
    "as",
    "naïve",
    "on",
    "be",
    "not",
)
CASES = {
    "tokens": ("jsonl", "jsonl.zst", "arrow", "lz4.feather", "zstd.feather"),
    "text": ("jsonl", "jsonl.zst", "arrow", "zstd.feather"),
}
SUFFIXES = {
    "jsonl": "JSON lines",
    "jsonl.zst": "JSON lines, zstd",
    "arrow": "Arrow stream",
    "lz4.feather": "Feather, lz4",
    "zstd.feather": "Feather, zstd",
}
"""What the table calls each."""
READERS = {"jsonl": ("torchmix", "json", "pyarrow"), "arrow": ("torchmix", "pyarrow")}


def make_documents(kind: str, num_tokens: int, seed: int) -> list[Any]:
    """Documents of log-normal length: zipf-like ids; or words with some quotes, ends of lines, letters beyond ASCII."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(MEAN) - 0.5, 1.0, num_tokens // MEAN), 8, 32_768).astype(np.int64)
    if kind == "tokens":
        ids = np.minimum(rng.zipf(1.2, int(lengths.sum())), 50_256).astype(np.int32)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    words = np.array(WORDS)
    return [" ".join(words[rng.integers(0, len(words), length * LETTERS // 4)]) for length in lengths]


def write_files(folder: Path, kind: str, suffix: str, options: argparse.Namespace) -> None:
    """The documents in files of one format and compression."""
    from torchmix.formats.jsonl.frames import reframe

    for i in range(options.files):
        path = folder / f"{kind}-{i:02d}.{suffix}"
        documents = make_documents(kind, options.tokens // options.files, i)
        if suffix.startswith("jsonl"):
            plain = path.with_name(f"plain-{i:02d}")
            rows = ({"id": n, "url": f"http://a.b/{n}", kind: document} for n, document in enumerate(documents))
            plain.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
            if suffix.endswith("zst"):
                reframe(plain, path)
                plain.unlink()
            else:
                plain.rename(path)
            continue
        column = pa.array(documents, pa.string() if kind == "text" else pa.list_(pa.int32()))
        table = pa.table({"id": range(len(documents)), kind: column})
        codec = None if suffix == "arrow" else suffix.split(".")[0]
        new = pa.ipc.new_stream if suffix == "arrow" else pa.ipc.new_file
        with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_table(table, max_chunksize=1000 if suffix == "arrow" else 100)  # as datasets, or small batches


def values_of(column: pa.ChunkedArray | pa.Array) -> Iterator[np.ndarray]:
    """Ids, or letters, of all rows end to end."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if pa.types.is_string(chunk.type) or pa.types.is_large_string(chunk.type):
            width = np.int64 if pa.types.is_large_string(chunk.type) else np.int32
            ends = np.frombuffer(chunk.buffers()[1], width)[chunk.offset :]
            yield np.frombuffer(chunk.buffers()[2], np.uint8)[ends[0] : ends[len(chunk)]]
        else:
            yield chunk.flatten().to_numpy()


def read_json(path: Path, kind: str) -> Iterator[np.ndarray]:
    """Python's parser on each line."""
    with pa.input_stream(str(path)) as stream:
        lines = stream.read().split(b"\n")
    for line in lines:
        if line:
            value = json.loads(line)[kind]
            yield np.frombuffer(value.encode(), np.uint8) if kind == "text" else np.array(value, np.int32)


def read_pyarrow(path: Path, kind: str) -> Iterator[np.ndarray]:
    """Whole files, this column alone."""
    import pyarrow.feather
    import pyarrow.json as pyarrow_json

    if path.suffix == ".feather":
        table = pyarrow.feather.read_table(str(path), [kind], memory_map=False, use_threads=False)
    elif path.suffix == ".arrow":
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as reader:
            table = reader.read_all()
    else:
        schema = pa.schema([(kind, pa.string() if kind == "text" else pa.list_(pa.int32()))])
        parse = pyarrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        settings = pyarrow_json.ReadOptions(use_threads=False, block_size=4 << 20)
        with pa.input_stream(str(path)) as stream:
            table = pyarrow_json.read_json(stream, settings, parse)
    yield from values_of(table[kind])


def read_torchmix(files: list[Path], kind: str, index: str) -> Iterator[np.ndarray]:
    """Rows in permuted order, epoch after epoch; the next window is decoded step by step."""
    import torchmix

    pages = torchmix.open_pages(
        [str(file) for file in files],
        **{kind: kind},
        catalog=index,
        cache=9 * WINDOW_BYTES // 4,
        window_pages=1 << 20,
        window_bytes=WINDOW_BYTES,
    )
    for batch in pages.batches(rows=ROWS_A_CALL, seed=1):
        yield from values_of(batch.rows)


def values_by(options: dict[str, Any]) -> Iterator[np.ndarray]:
    """Values of a contestant, for ever."""
    kind, files = options["kind"], sorted(Path(options["folder"]).glob(f"*.{options['suffix']}"))
    if options["reader"] == "torchmix":
        yield from read_torchmix(files, kind, options["index"])
    read = read_json if options["reader"] == "json" else read_pyarrow
    rng = np.random.default_rng(0)
    while True:
        for i in rng.permutation(len(files)).tolist():
            yield from read(files[i], kind)


def batches_of(values: Iterator[np.ndarray], kind: str) -> Iterator[np.ndarray]:
    """Values end to end, cut."""
    parts, held = [], 0
    want, dtype = (BATCH * LETTERS, np.uint8) if kind == "text" else (BATCH, np.int64)
    for part in values:
        parts.append(part)
        held += len(part)
        while held > want:
            joined = np.concatenate(parts)
            yield joined[: want + 1].astype(dtype)
            parts, held = [joined[want:]], held - want


def contest(options: dict[str, Any]) -> None:
    """Be a contestant: say what the first batch took, then make batches as asked."""
    import pyarrow.feather
    import pyarrow.json  # noqa: F401

    import torchmix

    assert torchmix.open_pages and len(pa.array([0]).to_numpy())  # what these import at their first use
    pa.set_cpu_count(1)
    began, began_cpu = time.perf_counter(), time.process_time()
    batches = batches_of(values_by(options), options["kind"])
    next(batches)
    reply(first_s=time.perf_counter() - began, first_cpu_s=time.process_time() - began_cpu)
    for request in requests():
        began_cpu = time.process_time()
        for _ in range(request["batches"]):
            next(batches)
        reply(cpu_s=time.process_time() - began_cpu)


def measure(folder: Path, kind: str, suffix: str, options: argparse.Namespace) -> dict[str, Any]:
    """All readers over the files of a folder."""
    readers = READERS["jsonl" if suffix.startswith("jsonl") else "arrow"]
    told = {"folder": str(folder), "kind": kind, "suffix": suffix, "index": str(folder / "index")}
    found: dict[str, Any] = {"bytes": sum(file.stat().st_size for file in folder.glob(f"*.{suffix}"))}
    indexer = Contestant(__file__, reader="torchmix", **told)
    found["cold"] = indexer.answer()
    indexer.close()
    contestants = {reader: Contestant(__file__, reader=reader, **told) for reader in readers}
    found["first"] = {reader: contestant.answer() for reader, contestant in contestants.items()}
    for contestant in contestants.values():
        contestant.ask(batches=options.batches)  # over the first windows
    found["cpu_s"] = {reader: [] for reader in readers}
    for _ in range(options.rounds):
        for reader, contestant in contestants.items():
            found["cpu_s"][reader].append(contestant.ask(batches=options.batches)["cpu_s"])
    for contestant in contestants.values():
        contestant.close()
    return found


def print_case(name: str, found: dict[str, Any], options: argparse.Namespace) -> None:
    """One row of the table."""
    spent = {reader: np.array(values) for reader, values in found["cpu_s"].items()}
    amount = BATCH * options.batches

    def over(rival: str) -> str:
        if rival not in spent:
            return ""
        ratios = spent[rival] / spent["torchmix"]
        return f"{statistics.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"

    pass_s = statistics.median(spent["pyarrow"]) * options.tokens / amount
    first = [found["cold"]["first_cpu_s"], found["first"]["torchmix"]["first_cpu_s"]]
    print(
        f"| {name} | {over('json')} | {over('pyarrow')} | {first[0] / pass_s:.2g} | {first[1] / pass_s:.2g} "
        f"| {found['first']['pyarrow']['first_cpu_s'] / pass_s:.2g} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=10, help="batches of a round")
    parser.add_argument("--quick", action="store_true", help="little data: does it run")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contest(json.loads(options.contestant))
        return
    if options.quick:
        options.tokens, options.files, options.rounds, options.batches = 1_000_000, 4, 2, 2
    print("| files | over json | over pyarrow | first batch: no index | index | pyarrow |\n|---|---|---|---|---|---|")
    results = []
    for kind, suffixes in CASES.items():
        for suffix in suffixes:
            with tempfile.TemporaryDirectory() as name:
                write_files(Path(name), kind, suffix, options)
                found = measure(Path(name), kind, suffix, options)
            print_case(f"{kind}, {SUFFIXES[suffix]}", found, options)
            results.append({"files": f"{kind}.{suffix}", **found})
    print(json.dumps({"benchmark": "formats", "tokens": options.tokens, "results": results}))


if __name__ == "__main__":
    main()
