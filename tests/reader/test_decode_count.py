"""`decode_amplification` is pages decoded over distinct pages of their window."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support.catalogs import make_world
from tests.support.files import make_tokens_file, random_tokens
from tests.support.loaders import write_job
from tests.support.reading import pieces, read_with_successors
from torchmix.pages import open_pages
from torchmix.parallel.topology import Topology
from torchmix.reader.page_cache import DecodeCount
from torchmix.reader.reader import Reader
from torchmix.stateful.open import build_loader


def test_a_page_counts_once_in_each_window_of_its_source():
    count = DecodeCount([0, 4, 10])
    assert count.amplification == 1.0  # nothing had to be decoded
    for key in (0, 1, 4, 5):
        count.add(key)
    assert count.amplification == 1.0
    count.add(1)
    assert count.amplification == 5 / 4
    count.end_window(0, np.array([1]))
    count.add(1)  # for the next window
    count.add(0)  # again for the same one
    assert count.amplification == 7 / 5
    count.end_window(1, None)
    count.add(4)
    count.add(5)
    assert count.amplification == 9 / 7
    count.add(1)
    assert count.amplification == 10 / 7


def test_few_tokens_of_large_pages_are_no_amplification(tmp_path: Path) -> None:
    world = make_world(
        tmp_path, {"web": [random_tokens(5, 400, mean_tokens=100)]}, choices={"web": {"page_bytes": 1 << 20}}
    )
    reader = Reader(world.index(), tmp_path, cache_bytes=1 << 24)
    read_with_successors(reader, pieces((0, 7, 0, 1)))
    stats = reader.stats()
    reader.close()
    assert stats["bytes_decoded"] > 140 * stats["bytes_served"] and stats["pages_decoded"] == 1
    assert stats["decode_amplification"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["page", "row", "none"])
def test_of_a_loader_over_several_epochs(tmp_path: Path, method: str) -> None:
    """The sources go through their rows again and again: windows of a later epoch are other windows."""

    def figure(cache: str) -> float:
        job = write_job(tmp_path / cache, samples=16, extra=f"read: {{cache: {cache}}}")
        job.write_text(job.read_text().replace("shuffle: {", f"shuffle: {{method: {method}, "))
        with build_loader(job, topology=Topology(), loaders="in_process") as loader:
            for _ in islice(loader, 16 * 150):
                pass
            return float(loader.stats()["decode_amplification"])

    assert figure("64MiB") == 1.0
    assert figure("1KiB") > 1.3


@pytest.mark.parametrize("method", ["page", "row"])
def test_of_pages_for_other_loaders(tmp_path: Path, method: str) -> None:
    make_tokens_file(tmp_path / "a.parquet", random_tokens(3, 400, mean_tokens=40))

    def figure(cache: str) -> float:
        options = {"tokens": "input_ids", "window_pages": 4, "cache": cache}
        with open_pages(tmp_path / "a.parquet", catalog=tmp_path / "index", **options) as pages:
            for _ in pages.batches(rows=10, seed=1, epochs=4, method=method):  # type: ignore[arg-type]
                pass
            return float(pages.stats()["decode_amplification"])

    assert figure("1MiB") == 1.0
    assert figure("1KiB") > 2.0
