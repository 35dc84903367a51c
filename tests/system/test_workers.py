"""Worker processes: the same order at every layout, errors of their own type, nothing left behind."""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdataLoader

import torchmix
from tests.support.catalogs import open_catalog
from tests.support.deadlines import LONG_S
from tests.support.files import flip_byte
from tests.support.loaders import Rank, run_job, same_microbatches, write_job
from tests.support.processes import wait_until, workers_of_this_process
from torchmix.errors import CorruptPage, SourceChanged
from torchmix.parallel.children import start_interpreter
from torchmix.parallel.place_tree import Layout
from torchmix.parallel.topology import Topology
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.stateful.stream import StepStream
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.worker import keeper
from torchmix.steps.worker.keeper import WORKER

pytestmark = pytest.mark.system
STEPS = 5
LAYOUTS = [
    Topology(),
    Topology(dp=4),
    Topology(tp=2, cp=2),
    Topology(pp=2, dp=2),
    Topology(tp=2, cp=2, pp=2),
]
"""Each replica has a worker: few replicas, and the other axes together."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def digests(job: Path) -> list[str]:
    return run_job(job, Topology(), steps=STEPS, keep=False)[0].digests


@pytest.mark.parametrize(("topology", "look_ahead"), [*zip(LAYOUTS, cycle((1, 4)))], ids=str)
def test_workers_follow_the_same_order(job: Path, digests: list[str], topology: Topology, look_ahead: int) -> None:
    ranks = run_job(job, topology, steps=STEPS, loaders="node", look_ahead=look_ahead, keep=False)
    assert [rank.digests for rank in ranks] == [digests] * topology.world_size
    wait_until(lambda: not workers_of_this_process(), deadline_s=120, what="end of the workers")


def test_states_of_one_and_of_no_worker_load_into_each_other(job: Path) -> None:
    whole = run_job(job, Topology(), microbatches=24)[0]
    first = run_job(job, Topology(), microbatches=11, loaders="node")[0]
    second = run_job(job, Topology(), microbatches=6, loaders="in_process", state=first.state)[0]
    third = run_job(job, Topology(), microbatches=7, loaders="node", state=second.state)[0]
    found = first.microbatches + second.microbatches + third.microbatches
    assert same_microbatches(whole.microbatches, found)
    assert third.state == whole.state


RAMP = "[{from_step: 0, samples: 4}, {from_step: 2, samples: 16}, {from_step: 4, samples: 8}]"


def test_a_worker_gives_the_tensors_that_are_made_here_and_never_writes_to_those_that_are_held(tmp_path: Path) -> None:
    job = write_job(tmp_path, samples=RAMP)
    here = run_job(job, Topology(), steps=12)[0]

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        for number, microbatch in enumerate(islice(loader, len(here.microbatches))):
            # Some are held to the end, the others are let go, so that their memory is used again.
            same = same_microbatches([microbatch], [here.microbatches[number]])
            rank.digests.append(str(same))
            if number % 9 == 0:
                rank.microbatches.append(microbatch)

    there = run_job(job, Topology(), program=program, loaders="node")[0]
    assert there.digests == ["True"] * len(here.microbatches)
    assert same_microbatches(there.microbatches, here.microbatches[::9])


def test_a_worker_does_not_load_torch_and_keeps_to_a_few_pieces_of_memory(job: Path) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc here")
    with build_loader(job, topology=Topology(), loaders="node", look_ahead=2) as loader:
        for _ in islice(loader, 8 * 30):
            pass
        (worker,) = workers_of_this_process()
        maps = Path(f"/proc/{worker}/maps").read_text()
    assert "libarrow" in maps
    assert "libtorch" not in maps
    # Two wait in the worker, one is built, one is served, two wait in the feed, one is consumed, one more is held.
    assert 1 <= len(re.findall(r"memfd:torchmix\b(?!-)", maps)) <= 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced_and_the_steps_go_on(
    job: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    # Blocks double: of so many steps no more than 126 can have been made when the worker is lost.
    whole = run_job(job, Topology(), steps=160)[0]
    with build_loader(job, topology=Topology(), loaders="node", look_ahead=1, max_steps=160) as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(13)]
        (first,) = workers_of_this_process()
        os.kill(first, number)
        found += iterator
        (second,) = workers_of_this_process()
        assert loader.stats()["workers_lost"] == 1
    assert same_microbatches(whole.microbatches, found)
    assert second != first
    [line] = [record.getMessage() for record in caplog.records if "node worker" in record.getMessage()]
    assert f"the node worker {first} " in line
    assert f"a new one, process {second}, takes its place" in line
    assert not workers_of_this_process()


def test_a_worker_that_hangs_is_ended_with_its_loader(job: Path) -> None:
    with build_loader(job, topology=Topology(), loaders="node") as loader:
        next(iter(loader))
        (pid,) = workers_of_this_process()
        os.kill(pid, signal.SIGSTOP)  # as one that waits for a disk which does not answer
    assert not workers_of_this_process()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("loaders", ["in_process", "node"])
def test_a_damaged_page_is_named_by_the_loader(tmp_path: Path, loaders: str) -> None:
    job = write_job(tmp_path, checksums=True)
    pages = open_catalog(load_recipe(job), tmp_path).sources["web"].pages
    flip_byte(tmp_path / "web-0.parquet", int(pages.place(np.array([6])).offset[0]) - 3)
    with (
        build_loader(job, topology=Topology(), loaders=loaders) as loader,
        pytest.raises(CorruptPage, match=r"(?s)'web'.*web-0\.parquet"),
    ):
        for _ in islice(loader, 8 * 360):
            pass
    wait_until(lambda: not workers_of_this_process(), deadline_s=120, what="end of the workers")


@pytest.mark.parametrize("loaders", ["in_process", "node"])
def test_a_file_that_was_replaced_after_indexing_is_named_by_the_loader(tmp_path: Path, loaders: str) -> None:
    job = write_job(tmp_path)
    write_job(tmp_path / "other", seed=77)
    (tmp_path / "other" / "web-1.parquet").replace(tmp_path / "web-1.parquet")
    with (
        build_loader(job, topology=Topology(), loaders=loaders) as loader,
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
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start_interpreter(WORKER, theirs, ignored_signals=ignored)
        os.kill(process.pid, signal.SIGTERM)  # long before any Python runs in it
    assert process.wait(LONG_S) == exit_code  # nobody is at the other end: nothing to do
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_worker_ends_in_peace_whatever_its_threads_are_doing() -> None:
    # As those of a tokenizer, or of pyarrow; at the interpreter's teardown they would abort the process.
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        code = (
            "from tests.support.busy_threads import leave_busy_threads; leave_busy_threads(8); "
            f"from torchmix.steps.worker.main import main; main({theirs.fileno()}, [], 0)"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_has_the_flags_and_the_path_of_its_leader(job: Path) -> None:
    # An interpreter that finds nothing by itself.
    code = f"""
import sys
sys.path[:0] = {[str(Path(torchmix.__file__).parents[1]), *sys.path]!r}
import torchmix
with torchmix.build_loader({str(job)!r}, topology=torchmix.Topology.single(), loaders="node") as loader:
    next(iter(loader))
    from tests.support.processes import workers_of_this_process
    (worker,) = workers_of_this_process()
    print(open(f"/proc/{{worker}}/cmdline").read().split(chr(0))[1:5])
"""
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert {"-I", "-S"} <= set(ast.literal_eval(done.stdout))


def test_a_worker_that_plans_its_way_to_a_far_start_ends_with_its_loader(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, kill = [], subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: (killed.append(process), kill(process)))
    monkeypatch.setattr(keeper, "END_S", 60.0)  # on a busy machine it may still be importing
    loader = build_loader(job, topology=Topology(), loaders="node", start_step=10**7)
    iter(loader)
    wait_until(lambda: len(workers_of_this_process()) == 1, deadline_s=120, what="the worker")
    loader.close()
    assert not workers_of_this_process()
    assert not killed, "it ends by itself"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call
def test_a_stream_runs_and_resumes_in_a_worker_of_torch(job: Path) -> None:
    def loader() -> TorchdataLoader:
        recipe = load_recipe(job)
        settings = StreamSettings(
            part=part_of(recipe, "train"),
            base=str(job.parent),
            catalog_folder=str(job.parent / recipe.catalog),
            cache_bytes=parse_bytes(recipe.read.cache, where="read.cache"),
            replica=0,
            layout=Layout(),
        )
        return TorchdataLoader(StepStream(settings), batch_size=None, num_workers=1, multiprocessing_context="spawn")

    here = run_job(job, Topology(), steps=5)[0]
    first = loader()
    found = [step.microbatches() for step in islice(first, 2)]
    second = loader()
    second.load_state_dict(first.state_dict())
    found += [step.microbatches() for step in islice(second, 3)]
    assert same_microbatches([microbatch for step in found for microbatch in step], here.microbatches)
