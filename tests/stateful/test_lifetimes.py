"""How long things live: tensors that are held, iterators, threads, files, and work that is prepared ahead."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.deadlines import LONG_S
from tests.support.loaders import FIELDS, Rank, run_job, same_microbatches, take, write_job
from tests.support.process_table import open_descriptors
from tests.support.processes import wait_until
from tests.support.threads import own_threads
from torchmix.errors import CorruptPage, LoaderClosed, OptionError, StateMismatch
from torchmix.parallel.topology import Topology
from torchmix.planner.planner import Planner
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader
from torchmix.steps import replica_steps as steps


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("topology", [Topology(), Topology(cp=2), Topology(tp=2)], ids=str)
def test_what_the_trainer_holds_is_never_written_again(job: Path, topology: Topology) -> None:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        views = []
        for microbatch in islice(loader, 80):
            rank.microbatches.append(microbatch)
            views.append({name: getattr(microbatch, name).numpy().copy() for name in FIELDS})
            if len(rank.microbatches) % 3:
                microbatch.tokens[0, :4].zero_()  # a trainer may write to what it was given
                views[-1]["tokens"][0, :4] = 0
        rank.result = views

    for rank in run_job(job, topology, program=program):
        for microbatch, view in zip(rank.microbatches, rank.result, strict=True):
            for name in FIELDS:
                assert np.array_equal(getattr(microbatch, name).numpy(), view[name]), (microbatch.step, name)


def test_an_error_in_the_loops_body_leaves_the_state_of_the_last_microbatch(job: Path) -> None:
    whole = run_job(job, Topology(), microbatches=20)[0]
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        with pytest.raises(ZeroDivisionError):
            for count, _ in enumerate(loader):
                1 / (10 - count)
        state = loader.state_dict()
        found = [microbatch for _, microbatch in zip(range(3), loader, strict=False)]
    assert same_microbatches(whole.microbatches[11:14], found)
    rest = run_job(job, Topology(), microbatches=9, state=state)[0]
    assert same_microbatches(whole.microbatches[11:], rest.microbatches)


def test_a_held_iterator_goes_on_after_an_end_and_after_an_error(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CorruptPage("page 7 does not decode")

    with build_loader(job, topology=Topology(), loaders="in_process", max_steps=2) as loader:
        held, state = iter(loader), loader.state_dict()
        first = list(held)
        assert len(first) == 16
        assert next(held, None) is None
        loader.load_state_dict(state)
        assert same_microbatches(first, list(held))
        with monkeypatch.context() as patch:
            patch.setattr(steps, "modules_of_step", fail)
            loader.load_state_dict(state)
            for _ in range(2):  # an error is not the end of the data, however often one asks
                with pytest.raises(CorruptPage):
                    next(held)
        loader.load_state_dict(state)
        assert same_microbatches(first, list(held))


def test_two_iterators_share_one_position(job: Path) -> None:
    whole = run_job(job, Topology(), microbatches=20)[0]
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        pairs = list(islice(zip(loader, loader, strict=True), 10))
    assert same_microbatches(whole.microbatches, [microbatch for pair in pairs for microbatch in pair])


def test_a_step_that_an_interrupt_has_lost_is_not_passed_over(job: Path) -> None:
    whole = run_job(job, Topology(), microbatches=20)[0]
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        found = list(islice(loader, 8))
        assert loader._feed is not None
        loader._feed.take()  # steps 1 and 2, taken by a call that was interrupted before it could keep them
        with pytest.raises(StateMismatch, match=r"waits for step 1 .* what came is step 3.*load_state_dict"):
            next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        found += islice(loader, 12)
    assert same_microbatches(whole.microbatches, found)


def test_a_loader_that_nobody_holds_or_closes_leaves_no_thread(job: Path) -> None:
    loader = build_loader(job, topology=Topology(), loaders="in_process")
    next(iter(loader))
    assert own_threads()
    del loader
    gc.collect()
    wait_until(lambda: not own_threads(), deadline_s=30, what="end of the threads")


@pytest.mark.slow
def test_loading_and_opening_many_times_leaves_no_thread_and_no_file(job: Path) -> None:
    def cycle() -> None:
        with build_loader(job, topology=Topology(), loaders="in_process") as loader:
            for _ in range(3):
                take(loader, Rank(), 11, keep=False)
                loader.load_state_dict(loader.state_dict())

    cycle()
    gc.collect()
    files, threads = open_descriptors(), set(threading.enumerate())
    for _ in range(4):
        cycle()
    gc.collect()
    assert open_descriptors() <= files and set(threading.enumerate()) <= threads


def test_planning_runs_off_the_training_thread_and_ahead_of_what_is_consumed(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: dict[int, threading.Event] = {step: threading.Event() for step in range(20)}
    threads: set[str] = set()
    step = Planner.step

    def watched(planner: Planner, cursor: Any) -> Any:
        made = step(planner, cursor)
        threads.add(threading.current_thread().name)
        planned[cursor.step].set()
        return made

    monkeypatch.setattr(Planner, "step", watched)
    with build_loader(job, topology=Topology(), loaders="in_process", look_ahead=2) as loader:
        microbatch = next(iter(loader))
        # Step 0 is in hand. Two steps wait in the feed, and it holds one, step 3; blocks are of 1, 2 and 4 steps.
        for ahead in range(1, 7):
            assert planned[ahead].wait(LONG_S), f"step {ahead} is planned while step {microbatch.step} is consumed"
        assert not planned[7].is_set()
    assert threads == {"torchmix-feed"}


def test_a_state_of_a_closed_loader_is_that_of_its_last_microbatch(job: Path) -> None:
    whole = run_job(job, Topology(), microbatches=20)[0]
    with build_loader(job, topology=Topology(), loaders="in_process", elastic=True) as elastic:
        list(islice(elastic, 7))
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        found = list(islice(loader, 7))
        open_state = loader.state_dict()
    assert not found[-1].is_last_of_step, "inside a step"
    assert loader.state_dict() == elastic.state_dict() == open_state
    rest = run_job(job, Topology(), microbatches=9, state=loader.state_dict())[0]
    assert same_microbatches(whole.microbatches[7:16], rest.microbatches)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_loader_is_not_doubled(job: Path, duplicate: Callable[[Any], Any], is_running: bool) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        if is_running:
            list(islice(loader, 3))
        with pytest.raises(OptionError, match=r"not copied or pickled.*call build_loader"):
            duplicate(loader)
        assert len(list(islice(loader, 3))) == 3


def test_a_fork_of_the_trainer_has_no_loader(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        found, iterator = list(islice(loader, 3)), iter(loader)
        state, process = loader.state_dict(), os.getpid()
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: 7)
            for use in (lambda: next(iterator), lambda: iter(loader), lambda: loader.load_state_dict(state)):
                with pytest.raises(LoaderClosed, match=f"one of process {process}, of which .* 7, is a fork"):
                    use()
            assert loader.state_dict() == state, "one that was taken before is saved by it"
            loader.close()
        found += list(islice(loader, 3))
    assert same_microbatches(run_job(job, Topology(), microbatches=6)[0].microbatches, found)


def test_workers_and_pinning_of_torchs_class_are_refused_by_name(job: Path) -> None:
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        assert (loader.num_workers, loader.pin_memory) == (0, False)
        loader.num_workers, loader.pin_memory = 0, False  # a trainer may say so
        with pytest.raises(OptionError, match="num_workers=2: `loaders` of the recipe"):
            loader.num_workers = 2
        with pytest.raises(OptionError, match="pin_memory=True: the loader pins"):
            loader.pin_memory = True
        assert len(list(islice(loader, 2))) == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves alone
def test_torchs_distributed_checkpoint_takes_the_loader_or_its_state(job: Path, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp  # takes more than a second, and no other test needs it

    whole = run_job(job, Topology(), microbatches=20)[0]
    with build_loader(job, topology=Topology(), loaders="in_process") as loader:
        list(islice(loader, 7))
        dcp.save({"loader": loader, "state": loader.state_dict()}, checkpoint_id=tmp_path / "saved")
    for asked in ("loader", "state"):
        with build_loader(job, topology=Topology(), loaders="in_process") as loader:
            saved: dict[str, Any] = {asked: loader if asked == "loader" else loader.state_dict()}
            dcp.load(saved, checkpoint_id=tmp_path / "saved")
            if asked == "state":
                loader.load_state_dict(saved["state"])
            assert same_microbatches(whole.microbatches[7:12], list(islice(loader, 5)))
