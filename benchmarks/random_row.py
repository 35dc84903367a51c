"""One random row: latency, and bytes that the kernel hands over, by reader.

    python benchmarks/random_row.py [--tokens 128000000] [--page-kb 256] [--quick]

The file has lists of int32 in zstd with Arrow's default dictionaries, documents of 800 tokens on average, row groups of
40,000 rows (about 60 MB each on disk). Every reader gives the same random rows, one by one, and each row is compared
with the file. Bytes are those of /proc/self/io (`rchar`: all that read calls returned), so what a reader takes from
mapped memory is not in them; such readers are marked. Polars, DuckDB, Lance and Hugging Face's datasets take part where
they are installed. The last two read copies of their own: what making them costs in time and disk stands beside.

Opening a file and reading its footer, or index, is not counted for any reader; the files are in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from synthetic import write_tokens

import torchmix

ReadRow = Callable[[int], Any]
"""Row number -> its tokens."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    name: str
    read_row: ReadRow
    num_rows: int
    """Rows to try; slow readers get fewer."""
    conversion_s: float = 0.0
    conversion_bytes: int = 0
    is_mapped: bool = False


def bytes_read() -> int:
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))


def torchmix_pages(path: Path, folder: Path, num_rows: int) -> Contestant:
    pages = torchmix.open_pages(str(path), tokens="input_ids", catalog=str(folder / "index"), cache="1")
    return Contestant(name="torchmix", read_row=lambda row: pages.read_rows([row])[0].values, num_rows=num_rows)


def pyarrow_row_group(path: Path, num_rows: int) -> Contestant:
    file = pq.ParquetFile(path)
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    ends = np.cumsum(groups)

    def read_row(row: int) -> Any:
        group = int(np.searchsorted(ends, row, side="right"))
        column = file.read_row_group(group, columns=["input_ids"]).column(0)
        return column[row - int(ends[group] - groups[group])].values

    return Contestant(name="pyarrow, row group", read_row=read_row, num_rows=num_rows)


def polars_slice(path: Path, num_rows: int) -> Contestant:
    import polars

    frame = polars.scan_parquet(path)
    return Contestant(
        name="polars, slice",
        read_row=lambda row: frame.select("input_ids").slice(row, 1).collect()["input_ids"][0],
        num_rows=num_rows,
    )


def duckdb_row_number(path: Path, num_rows: int) -> Contestant:
    import duckdb

    connection = duckdb.connect()
    connection.execute("SET threads TO 1")
    query = f"SELECT input_ids FROM read_parquet('{path}', file_row_number=true) WHERE file_row_number = ?"
    return Contestant(
        name="DuckDB, file_row_number",
        read_row=lambda row: connection.execute(query, [row]).fetchnumpy()["input_ids"][0],
        num_rows=num_rows,
    )


def lance_copy(path: Path, folder: Path, num_rows: int) -> Contestant:
    import lance

    began = time.perf_counter()
    dataset = lance.write_dataset(
        pq.ParquetFile(path).iter_batches(1024), folder / "copy.lance", schema=pq.read_schema(path)
    )
    return Contestant(
        name="Lance, after conversion",
        read_row=lambda row: dataset.take([row], columns=["input_ids"]).column(0)[0].values,
        num_rows=num_rows,
        conversion_s=time.perf_counter() - began,
        conversion_bytes=size_of(folder / "copy.lance"),
    )


def datasets_copy(path: Path, folder: Path, num_rows: int) -> Contestant:
    import datasets

    datasets.disable_progress_bars()
    began = time.perf_counter()
    data = datasets.Dataset.from_parquet(str(path), cache_dir=str(folder / "huggingface")).with_format("numpy")
    return Contestant(
        name="Hugging Face datasets, after conversion",
        read_row=lambda row: data[row]["input_ids"],
        num_rows=num_rows,
        conversion_s=time.perf_counter() - began,
        conversion_bytes=size_of(folder / "huggingface"),
        is_mapped=True,
    )


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def contestants(path: Path, folder: Path, num_rows: int) -> Iterator[Contestant]:
    yield torchmix_pages(path, folder, num_rows)
    yield pyarrow_row_group(path, max(3, num_rows // 20))
    for package, make in (("polars", polars_slice), ("duckdb", duckdb_row_number)):
        if importlib.util.find_spec(package):
            yield make(path, max(3, num_rows // 10))
    for package, convert in (("lance", lance_copy), ("datasets", datasets_copy)):
        if importlib.util.find_spec(package):
            yield convert(path, folder, num_rows)


def measure(contestant: Contestant, rows: list[int], expected: list[Any]) -> tuple[float, float, float]:
    """Median ms, those of CPU time, and mean bytes, of one row; the first one, which opens things, is left out."""
    contestant.read_row(rows[-1])
    times, cpu_times = [], []
    before = bytes_read()
    for row, tokens in zip(rows[: contestant.num_rows], expected, strict=False):
        began, began_cpu = time.perf_counter(), time.process_time()
        found = contestant.read_row(row)
        times.append(time.perf_counter() - began)
        cpu_times.append(time.process_time() - began_cpu)
        assert np.array_equal(np.asarray(found), tokens), f"{contestant.name} gives another row {row}"
    own = len(Path("/proc/self/io").read_bytes())  # what asking costs
    medians = [statistics.median(values) * 1e3 for values in (times, cpu_times)]
    return *medians, (bytes_read() - before - own) / len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128_000_000)
    parser.add_argument("--page-kb", type=int, default=256)
    parser.add_argument("--rows", type=int, default=200, help="random rows for the fast readers")
    parser.add_argument("--quick", action="store_true", help="a small file, few rows")
    options = parser.parse_args()
    num_tokens, num_rows = (8_000_000, 20) if options.quick else (options.tokens, options.rows)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / "tokens.parquet"
        write_tokens(path, num_tokens=num_tokens, page_bytes=options.page_kb << 10, row_group_rows=40_000)
        column = pq.read_table(path, columns=["input_ids"]).column(0)
        rows = np.random.default_rng(1).integers(0, len(column), num_rows).tolist()
        expected = [column[row].values.to_numpy() for row in rows]
        del column
        print("| reader | ms | CPU ms | KB | x torchmix's time | CPU time | bytes | conversion s | copy / file |")
        print("|---|---|---|---|---|---|---|---|---|")
        ours: tuple[float, float, float] | None = None
        for contestant in contestants(path, folder, num_rows):
            ms, cpu_ms, num_bytes = measure(contestant, rows, expected)
            ours = ours or (ms, cpu_ms, num_bytes)
            copy = contestant.conversion_bytes / path.stat().st_size
            read_kb = "mapped" if contestant.is_mapped else f"{num_bytes / 1e3:.0f}"
            print(
                f"| {contestant.name} | {ms:.2f} | {cpu_ms:.2f} | {read_kb} | "
                f"{ms / ours[0]:.3g} | {cpu_ms / ours[1]:.3g} | "
                f"{'-' if contestant.is_mapped else f'{num_bytes / ours[2]:.3g}'} | "
                f"{contestant.conversion_s:.1f} | {copy:.2f} |",
                flush=True,
            )
            results.append({"reader": contestant.name, "ms": ms, "cpu_ms": cpu_ms, "bytes": num_bytes, "copy": copy})
    print(json.dumps({"benchmark": "random_row", "page_kb": options.page_kb, "results": results}))


if __name__ == "__main__":
    main()
