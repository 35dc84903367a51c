"""The example of a dataset on the reader: every row once, by any number of readers, also after a resume."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.deadlines import LONG_S
from tests.support.files import make_tokens_file, random_tokens
from tests.support.processes import ROOT, Processes
from torchmix.pages import Pages, open_pages

SCRIPT = ROOT / "examples" / "reading" / "dataset.py"
DOCUMENTS = random_tokens(1, 1500, mean_tokens=30)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reading_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    monkeypatch.chdir(tmp_path)
    make_tokens_file(tmp_path / "web.parquet", DOCUMENTS)
    return open_pages("web.parquet", tokens="input_ids", catalog="index", window_pages=2)


def lists(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [tensor.tolist() for tensor in tensors]


def test_the_class_has_50_lines() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text[: text.index("\ndef main")].splitlines()) <= 50


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_together_give_every_row_once_an_epoch(example: ModuleType, pages: Pages, world_size: int) -> None:
    found = []
    for rank in range(world_size):
        dataset = example.Rows(pages, seed=3, rank=rank, world_size=world_size)
        order = pages.permuted_order(seed=3)
        num_rows = sum(len(order[window]) for window in range(rank, len(order), world_size))
        found += lists(list(islice(iter(dataset), num_rows)))
        assert dataset.place[0] == 0
    assert sorted(found) == sorted(DOCUMENTS)


@pytest.mark.slow
def test_a_resume_goes_on_where_it_was_and_into_the_next_epoch(example: ModuleType, pages: Pages) -> None:
    whole = lists(list(islice(iter(example.Rows(pages, seed=3)), 3200)))
    assert sorted(whole[:1500]) == sorted(whole[1500:3000]) == sorted(DOCUMENTS) and whole[:1500] != whole[1500:3000]
    for stop in (1, 127, 128, 700, 1500, 2999):
        dataset = example.Rows(pages, seed=3)
        assert lists(list(islice(iter(dataset), stop))) == whole[:stop]
        again = example.Rows(pages, seed=3)
        again.load_state_dict(dataset.state_dict())
        assert lists(list(islice(iter(again), 150))) == whole[stop : stop + 150]


@pytest.mark.system
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_script_runs_as_it_says_with_a_worker_that_is_forked_or_spawned(tmp_path: Path, start: str) -> None:
    make_tokens_file(tmp_path / "data" / "web-0.parquet", DOCUMENTS)
    code = (
        "import multiprocessing, sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"multiprocessing.set_start_method({start!r})\n"
        "import dataset\n"
        "dataset.main()\n"
    )
    with Processes(tmp_path) as processes:
        inside = f"import os\nos.chdir({str(tmp_path)!r})\n{code}"
        done = processes.fork_python("-c", inside, "data/*.parquet", "--tokens", "input_ids", "--rows", "2000")
        assert done.wait(deadline_s=LONG_S) == 0, done.report()
        printed = done.stdout()
    assert "1,500 rows in " in printed and "read 2,000 rows" in printed
