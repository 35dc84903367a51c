"""Files of many writers, read by page and compared with pyarrow's reading of the whole file, row by row.

    python tests/writers/check_files.py FOLDER [WRITER ...]

Makes an environment for each writer with venv and pip, and the files in it, unless FOLDER has them already. Writers are
those of WRITERS; spark needs Java 17. Prints a line for each: files, columns compared, pages, pages that begin inside a
row, and bytes read twice for them. Any difference is an error.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.pages import page_runs  # noqa: E402 - the repository's own
from tests.support.whole_files import assert_reads_as_a_whole, columns_of_file  # noqa: E402
from torchmix.formats.parquet.source import ParquetSource  # noqa: E402

WRITERS = {
    "pyarrow-12": ("pyarrow", ["pyarrow==12.0.1", "numpy<2"]),
    "pyarrow-14": ("pyarrow", ["pyarrow==14.0.2", "numpy<2"]),
    "pyarrow-17": ("pyarrow", ["pyarrow==17.0.0", "numpy<2"]),
    "pyarrow": ("pyarrow", ["pyarrow"]),
    "polars": ("polars", ["polars"]),
    "duckdb": ("duckdb", ["duckdb", "pyarrow"]),
    "fastparquet": ("fastparquet", ["fastparquet"]),
    "arro3": ("arro3", ["arro3-core", "arro3-io", "pyarrow"]),
    "datasets": ("datasets", ["datasets"]),
    "spark": ("spark", ["pyspark==3.5.6", "setuptools"]),
}
LARGE_BYTES = 20 << 20
"""Files that are compared as arrays, since Python lists of them would not fit."""


@dataclass(kw_only=True)
class Found:
    """What was read of one writer's files."""

    files: int = 0
    columns: int = 0
    pages: int = 0
    split_pages: int = 0
    page_bytes: int = 0
    tail_bytes: int = 0


def main() -> None:
    folder, *names = Path(sys.argv[1]), *sys.argv[2:]
    print("writer | files | columns | pages | begin inside a row | read twice")
    for name in names or WRITERS:
        if not (folder / name).is_dir():
            make_files(folder, name)
        found = Found()
        for path in sorted((folder / name).glob("*.parquet")):
            check(path, found)
        twice = found.tail_bytes / found.page_bytes
        print(
            f"{name} | {found.files} | {found.columns} | {found.pages:,} | {found.split_pages / found.pages:.0%} | "
            f"{twice:.0%}",
            flush=True,
        )


def make_files(folder: Path, name: str) -> None:
    writer, packages = WRITERS[name]
    environment = folder / "environments" / name
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    script = Path(__file__).parent / "make_files.py"
    subprocess.run([python, script, writer, folder / name], check=True)


def check(path: Path, found: Found) -> None:
    found.files += 1
    if path.stat().st_size > LARGE_BYTES:
        columns = dict.fromkeys(pq.read_schema(path).names, "tokens")
        for name in columns:
            compare_arrays(path, name)
        found.columns += len(columns)
    else:
        found.columns += assert_reads_as_a_whole(path)
        columns = {name: kind for name, (kind, _) in columns_of_file(path).items()}
    for name, kind in columns.items():
        scan = ParquetSource(name="s", column=name, kind=kind).scan(path)
        found.pages += len(scan.page_rows)
        found.split_pages += scan.split_pages
        found.page_bytes += int(scan.page_bytes.sum())
        found.tail_bytes += int(scan.tail_bytes.sum())


def compare_arrays(path: Path, name: str) -> None:
    """As `assert_reads_as_a_whole`, of a column of lists, by page."""
    whole = pq.read_table(path, columns=[name]).column(0).combine_chunks()
    lengths, values = whole.value_lengths().fill_null(0).to_numpy(), whole.flatten().to_numpy()
    source = ParquetSource(name="s", column=name, kind="tokens")
    scan = source.scan(path)
    assert np.array_equal(scan.tokens, lengths)
    place = 0
    for run in page_runs(path, scan):
        [documents] = source.decode([run])
        assert np.array_equal(documents.values, values[place : place + len(documents.values)])
        place += len(documents.values)
    assert place == len(values)


if __name__ == "__main__":
    main()
