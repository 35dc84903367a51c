"""Pages -> runs and batches: what is read and decoded together."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.catalogs import make_world
from tests.support.files import random_tokens
from tests.support.split_rows import make_split_file
from torchmix.catalog.page_table import PageTable
from torchmix.reader.source_pages import batches, plan_runs


def table_of(folder: Path, *, split: bool) -> PageTable:
    files = {"web": [random_tokens(1, 200), random_tokens(2, 300, mean_tokens=50)]}
    world = make_world(folder, files, choices={"web": {"row_group_rows": 90}})
    if split:
        make_split_file(folder / "web" / "0.parquet", random_tokens(3, 200, mean_tokens=60), page_values=200)
    return world.index().sources["web"].pages


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("most_bytes", [1, 3000, 1 << 20])
def test_runs_are_pages_of_one_chunk_within_their_bound(tmp_path, split, most_bytes):
    table = table_of(tmp_path, split=split)
    assert table.num_chunks > 4
    rng = np.random.default_rng(5)
    for share in (1.0, 0.5, 0.1):
        pages = np.flatnonzero(rng.random(table.num_pages) < share)
        place = table.place(pages)
        runs = plan_runs(table, pages, most_bytes=most_bytes)
        assert [page for run in runs for page in run.pages] == pages.tolist()
        assert [size for run in runs for size in run.num_bytes] == place.num_bytes.tolist()
        assert [row for run in runs for row in run.first_row] == place.first_row.tolist()
        for run in runs:
            of_run = table.place(np.array(run.pages))
            assert set(of_run.chunk.tolist()) == {run.chunk} and table.file_of_chunk[run.chunk] == run.file
            assert len(run.pages) == 1 or sum(run.num_bytes) <= most_bytes
            assert sum(num_bytes for _, num_bytes in run.ranges) == sum(run.num_bytes) + run.tail_bytes[-1]
            assert all(a[0] + a[1] < b[0] for a, b in pairwise(run.ranges)), "pages end to end are one range"
            inner = of_run.tail_bytes[:-1].any() or of_run.begins_inside_row[1:].any()
            assert not inner or len(run.ranges) == 1, "split rows: none but neighbours"
        assert most_bytes == 1 or share < 0.2 or len(runs) < len(pages)
        together = list(batches(runs, most_bytes=most_bytes))
        assert [run for batch in together for run in batch] == runs
        sizes = [sum(sum(run.num_bytes) for run in batch) for batch in together]
        assert all(size <= most_bytes or len(batch) == 1 for size, batch in zip(sizes, together, strict=True))
        assert all(a + sum(b[0].num_bytes) > most_bytes for a, b in zip(sizes, together[1:], strict=False))


def test_no_pages_are_no_runs(tmp_path):
    assert plan_runs(table_of(tmp_path, split=False), [], most_bytes=100) == []
    assert list(batches([], most_bytes=100)) == []
