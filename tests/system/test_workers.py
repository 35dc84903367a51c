"""Worker processes: the same order at every layout, errors of their own type, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest

from tests.support.busy_threads import leave_busy_threads
from tests.support.files import flip_byte
from tests.support.loaders import run_job, same_microbatches, write_job
from tests.support.processes import wait_until
from torchmix.catalog.store import open_catalog
from torchmix.errors import CorruptPage, SourceChanged
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.stateful.open import build_loader
from torchmix.stateful.worker import WorkerContext, ignore_signals

pytestmark = pytest.mark.system
STEPS = 5
LAYOUTS = [
    Topology(),
    Topology(dp=4),
    Topology(tp=2, cp=2),
    Topology(pp=2, dp=2),
    Topology(tp=2, cp=2, pp=2),
]
"""Each replica has a worker, and each worker imports torch: few replicas, and the other axes together."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def digests(job: Path) -> list[str]:
    return run_job(job, Topology(), steps=STEPS, keep=False)[0].digests


@pytest.mark.parametrize(("topology", "look_ahead"), [*zip(LAYOUTS, cycle((1, 4)))], ids=str)
def test_workers_follow_the_same_order(job: Path, digests: list[str], topology: Topology, look_ahead: int) -> None:
    ranks = run_job(job, topology, steps=STEPS, workers=1, look_ahead=look_ahead, keep=False)
    assert [rank.digests for rank in ranks] == [digests] * topology.world_size
    wait_until(lambda: not multiprocessing.active_children(), deadline_s=30, what="end of the workers")


def test_states_of_one_and_of_no_worker_load_into_each_other(job: Path) -> None:
    whole = run_job(job, Topology(), microbatches=24)[0]
    first = run_job(job, Topology(), microbatches=11, workers=1)[0]
    second = run_job(job, Topology(), microbatches=6, workers=0, state=first.state)[0]
    third = run_job(job, Topology(), microbatches=7, workers=1, state=second.state)[0]
    found = first.microbatches + second.microbatches + third.microbatches
    assert same_microbatches(whole.microbatches, found)
    assert third.state == whole.state


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_page_is_named_by_the_loader(tmp_path: Path, workers: int) -> None:
    job = write_job(tmp_path, checksums=True)
    pages = open_catalog(load_recipe(job), tmp_path).sources["web"].pages
    flip_byte(tmp_path / "web-0.parquet", int(pages.place(np.array([6])).offset[0]) - 3)
    with (
        build_loader(job, topology=Topology(), workers=workers) as loader,
        pytest.raises(CorruptPage, match=r"(?s)'web'.*web-0\.parquet"),
    ):
        for _ in islice(loader, 8 * 360):
            pass
    wait_until(lambda: not multiprocessing.active_children(), deadline_s=30, what="end of the workers")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_was_replaced_after_indexing_is_named_by_the_loader(tmp_path: Path, workers: int) -> None:
    job = write_job(tmp_path)
    write_job(tmp_path / "other", seed=77)
    (tmp_path / "other" / "web-1.parquet").replace(tmp_path / "web-1.parquet")
    with (
        build_loader(job, topology=Topology(), workers=workers) as loader,
        pytest.raises(SourceChanged, match=r"(?s)'web'.*web-1\.parquet"),
    ):
        for _ in islice(loader, 8 * 360):
            pass


@pytest.mark.parametrize(
    ("ignored", "exit_code"), [((signal.SIGTERM,), 0), ((), -signal.SIGTERM)], ids=["ignored", "not ignored"]
)
def test_a_signal_that_a_worker_ignores_does_not_end_it_while_it_is_being_born(
    ignored: tuple[int, ...], exit_code: int
) -> None:
    process = WorkerContext(ignored_signals=ignored).Process(target=ignore_signals, args=(ignored,))
    process.start()
    os.kill(process.pid, signal.SIGTERM)  # long before any Python runs in it
    process.join(60)
    assert process.exitcode == exit_code
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_worker_ends_in_peace_whatever_its_threads_are_doing() -> None:
    # torch's queue leaves such a thread; at the interpreter's teardown it would abort the process.
    process = WorkerContext().Process(target=leave_busy_threads, args=(8,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_worker_that_plans_its_way_to_a_far_start_ends_with_its_loader(job: Path) -> None:
    loader = build_loader(job, topology=Topology(), workers=1, start_step=10**9)
    iter(loader)
    wait_until(lambda: len(multiprocessing.active_children()) == 1, deadline_s=30, what="the worker")
    loader.close()
    assert not multiprocessing.active_children()
