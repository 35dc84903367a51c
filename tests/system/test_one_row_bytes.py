"""One row costs its page and its dictionary, as the kernel counts it.

Not counted: opening the file, which reads its footer once, and the catalog, which is mapped memory.
"""

from __future__ import annotations

import json
import random

import msgspec
import numpy as np
import pytest

from tests.support.catalogs import make_world
from tests.support.processes import Processes

pytestmark = pytest.mark.system

SEED = 5
COUNTER_BYTES = 8
"""The text of the kernel's counter is read as well, and may get longer by a digit between two readings."""


@pytest.mark.parametrize(
    "choices",
    [
        {"page_bytes": 1 << 16},
        {"page_bytes": 1 << 16, "dictionary": True},
        {"page_bytes": 1 << 16, "dictionary": True, "page_index": False, "page_version": "2.0", "codec": "snappy"},
    ],
    ids=["plain", "dictionary", "without an index"],
)
def test_a_random_row_reads_no_more_than_its_page_and_its_dictionary(tmp_path, choices):
    rng = np.random.default_rng(SEED)
    documents = [rng.integers(0, 5000, rng.integers(100, 900)).tolist() for _ in range(1600)]
    world = make_world(tmp_path, {"web": [documents]}, choices={"web": {"row_group_rows": 400, **choices}})
    web = world.index().sources["web"]
    (tmp_path / "recipe.yaml").write_bytes(msgspec.json.encode(world.recipe))
    assert web.pages.num_chunks == 4 and web.pages.num_pages >= 24
    # Rows of chunks that were not touched before, then one more of the last of them: its dictionary is known by then.
    first_row = web.pages.chunk_row[:4].tolist()
    rows = [random.Random(SEED + chunk).randrange(first_row[chunk] + 50, first_row[chunk] + 350) for chunk in (1, 2, 3)]
    rows.append(first_row[3])
    with Processes(tmp_path) as processes:
        child = processes.fork_python("-m", "tests.support.read_rows", str(tmp_path / "recipe.yaml"), *map(str, rows))
        assert child.wait(deadline_s=120) == 0, child.report()
        reports = [json.loads(line) for line in child.stdout().splitlines()]
    assert len(reports) == len(rows)
    for row, report in zip(rows, reports, strict=True):
        print(row, {key: value for key, value in report.items() if key != "tokens"})
        assert report["tokens"] == documents[row]
    for report in reports[:3]:
        assert abs(report["kernel_bytes"] - report["page_bytes"] - report["dict_bytes"]) <= COUNTER_BYTES
    assert abs(reports[3]["kernel_bytes"] - reports[3]["page_bytes"]) <= COUNTER_BYTES
    assert max(report["page_bytes"] for report in reports) < (tmp_path / "web" / "0.parquet").stat().st_size / 15
