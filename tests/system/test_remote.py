"""`torchmix serve` and trainers that have the catalog and no data: the same tensors, and no loader left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.catalogs import open_catalog
from tests.support.deadlines import LONG_S
from tests.support.fleets import running
from tests.support.forks import ROOT
from tests.support.image_oracle import write_project
from tests.support.loaders import run_job, same_microbatches, take, write_job
from tests.support.ports import free_port
from tests.support.processes import COMMAND_LINE, Child, Processes, wait_until
from torchmix.errors import LoaderLost, OptionError
from torchmix.parallel.children import ProcessBeat, ProcessWatch
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.service.keys import write_keys
from torchmix.service.served import ServedCatalogs
from torchmix.service.server import new_pair

pytestmark = pytest.mark.system
STEPS = 12
NEVER_LISTENS = """
import signal, sys

if any("service.main" in word for word in sys.orig_argv):
    signal.pause()
"""
"""Runs as an interpreter starts, as the next one does."""
ONLY_LOOKS = """
import sys

if any("worker.main" in word for word in sys.orig_argv):
    from torchmix.parallel import children

    children.GRAIN_NS = 1 << 60
"""
"""Time of processors is no progress of a worker then: what it does while it waits takes some."""
SMALL_MODEL = {"layers": 2, "hidden": 8, "ffn": 16, "heads": 2}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def trainer(job, tmp_path_factory) -> Path:
    """The recipe and the catalog, without data."""
    folder = tmp_path_factory.mktemp("trainer")
    shutil.copy(job, folder / "recipe.yaml")
    shutil.copytree(job.parent / "catalog", folder / "catalog")
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "k"
    write_keys(folder, new_pair, num_clients=2)
    return folder


def serve(processes: Processes, recipe: Path, *words: str) -> Child:
    """Start `torchmix serve` and wait until it listens."""
    child = processes.fork_python(*COMMAND_LINE, "serve", str(recipe), *words, name="serve")
    child.wait_for_line("listen at", deadline_s=LONG_S)
    return child


@pytest.fixture(scope="module")
def fleet(job, keys, tmp_path_factory) -> Iterator[tuple[Child, Path]]:
    folder = tmp_path_factory.mktemp("endpoints")
    with Processes(tmp_path_factory.mktemp("out")) as processes:
        words = ("--bind", "tcp://127.0.0.1:0", "--processes", "2", "--keys", str(keys), "--register", str(folder))
        yield serve(processes, job, *words), folder


@pytest.mark.parametrize("topology", [Topology(), Topology(dp=2), Topology(tp=2, pp=2)], ids=str)
def test_trainers_without_data_get_the_tensors_of_those_that_read(job, trainer, keys, fleet, topology):
    loaders = {"where": "remote", "endpoints": str(fleet[1]), "keys": str(keys)}
    here = run_job(job, topology, steps=STEPS)
    there = run_job(trainer, topology, steps=STEPS, loaders=loaders)
    for one, other in zip(here, there, strict=True):
        assert same_microbatches(one.microbatches, other.microbatches)
        assert one.digests == other.digests


def test_a_run_goes_on_with_loaders_and_without(job, trainer, keys, fleet):
    loaders = {"where": "remote", "endpoints": [str(fleet[1])], "keys": str(keys / "client-1.secret")}
    whole = run_job(job, Topology(), microbatches=30)[0]
    first = run_job(trainer, Topology(), microbatches=11, loaders=loaders)[0]
    second = run_job(job, Topology(), microbatches=9, state=first.state)[0]
    third = run_job(trainer, Topology(), microbatches=10, loaders=loaders, state=second.state)[0]
    assert same_microbatches(whole.microbatches, first.microbatches + second.microbatches + third.microbatches)


def test_where_no_loader_answers_files_are_read_if_they_are_seen(job, trainer, tmp_path):
    loaders = {"where": "remote", "endpoints": "nowhere"}
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("torchmix.stateful.shared_loaders.LOST_S", 0.5)
        one = run_job(job, Topology(), steps=2, loaders=loaders)[0]
        assert same_microbatches(one.microbatches, run_job(job, Topology(), steps=2)[0].microbatches)
        with pytest.raises(LoaderLost, match=r"no loader answers at .*nowhere.*cannot read in their place"):
            run_job(trainer, Topology(), steps=2, loaders=loaders)


def test_a_node_reads_first_beside_loaders_and_after_they_have_gone(job, keys, tmp_path):
    with Processes(tmp_path) as processes:
        register = tmp_path / "endpoints"
        words = ("--bind", "tcp://127.0.0.1:0", "--keys", str(keys), "--register", str(register))
        child = serve(processes, job, *words)

        def program(loader, rank):
            is_gone = False
            for microbatch in loader:
                rank.microbatches.append(microbatch)
                rank.result = loader.stats()
                if not is_gone and rank.result["loaders_ready"] == 1:
                    child.send_signal(signal.SIGKILL)
                    is_gone = True
                if rank.result["total_loader_losses"]:
                    return
                time.sleep(0.01)  # a training step

        loaders = {"where": ["node", "remote"], "endpoints": str(register), "keys": str(keys), "cpu": 1}
        [rank] = run_job(job, Topology(), program=program, loaders=loaders, look_ahead=1)
    [here] = run_job(job, Topology(), microbatches=len(rank.microbatches))
    assert same_microbatches(here.microbatches, rank.microbatches)
    assert rank.result["total_loader_losses"] == 1 and rank.result["workers_lost"] == 0
    assert rank.result["total_node_tokens"] > 0 and rank.result["loaders_ready"] == 0


def test_wrong_keys_are_refused_by_name(trainer, fleet, tmp_path):
    loaders = {"where": "remote", "endpoints": str(fleet[1]), "keys": str(tmp_path)}
    with pytest.raises(OptionError, match=r"no client-K\.secret"):
        run_job(trainer, Topology(), steps=2, loaders=loaders)
    write_keys(tmp_path / "others", new_pair, num_clients=1)
    with pytest.raises(LoaderLost, match="handshake failed"):
        run_job(trainer, Topology(), steps=2, loaders={**loaders, "keys": str(tmp_path / "others")})


def test_figures_are_on_a_page_of_this_machine_and_sigterm_leaves_nothing(job, tmp_path):
    port = free_port()
    with Processes(tmp_path) as processes:
        register = tmp_path / "endpoints"
        words = ("--metrics", str(port), "--register", str(register))
        child = serve(processes, job, *words)
        assert len(list(register.iterdir())) == 1 and len(child.session) == 2
        run_job(job, Topology(), steps=2, loaders={"where": "remote", "endpoints": str(register)})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LONG_S) as page:
            lines = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[0] != "#")
        assert float(lines["torchmix_loader_requests_replies_total"]) >= 2
        child.send_signal(signal.SIGTERM)
        assert child.wait(deadline_s=LONG_S) == 0
        wait_until(lambda: not child.session, deadline_s=LONG_S, what="end of the loaders")
        assert not list(register.iterdir())


def test_loaders_end_with_whoever_started_them_and_come_back_when_they_are_killed(job, tmp_path):
    with Processes(tmp_path) as processes:
        register = tmp_path / "endpoints"
        child = serve(processes, job, "--processes", "2", "--register", str(register))
        [victim, _] = pids = [pid for pid in child.session if pid != child.pid]
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda: len(child.session) == 3 and victim not in child.session,
            deadline_s=LONG_S,
            what="another loader",
        )
        run_job(job, Topology(), steps=2, loaders={"where": "remote", "endpoints": str(register)})
        assert pids[1] in child.session
        child.send_signal(signal.SIGKILL)
        wait_until(lambda: not child.session, deadline_s=LONG_S, what="end of the loaders")
        assert len(list(register.iterdir())) == 2
        again = serve(processes, job, "--register", str(register))
        assert len(list(register.iterdir())) == 1, "the next one removes what a killed one has left"
        again.send_signal(signal.SIGTERM)
        assert again.wait(deadline_s=LONG_S) == 0, again.report()
        assert not list(register.iterdir())


def test_an_address_beyond_this_machine_needs_keys(job, tmp_path):
    with Processes(tmp_path) as processes:
        child = processes.fork_python(*COMMAND_LINE, "serve", str(job), "--json", "--bind", "tcp://0.0.0.0:0")
        assert child.wait(deadline_s=LONG_S) == 2
        assert "reached from other machines" in json.loads(child.stdout())["error"]["message"]
        words = ("serve", str(job), "--keys", str(tmp_path))
        child = processes.fork_python(*COMMAND_LINE, *words, name="keys without an address")
        assert child.wait(deadline_s=LONG_S) == 2 and "--keys goes with --bind tcp://" in child.stderr()


def test_loaders_without_keys_listen_where_this_user_alone_reaches_them_and_leave_no_folder(job, tmp_path):
    with Processes(tmp_path) as processes:
        child = serve(processes, job, "--processes", "2")
        endpoints = child.stdout().partition("listen at ")[2].strip().split(", ")
        folders = {Path(one.removeprefix("ipc://")).parent for one in endpoints}
        [folder] = folders
        assert len(endpoints) == 2 and stat.S_IMODE(folder.stat().st_mode) == 0o700
        run_job(job, Topology(), steps=2, loaders={"where": "remote", "endpoints": endpoints})
        child.send_signal(signal.SIGTERM)
        assert child.wait(deadline_s=LONG_S) == 0 and not folder.exists()


def path_with(folder: Path, site: str) -> str:
    """What PYTHONPATH is to be, so that new interpreters run a text first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(site)
    return os.pathsep.join([str(folder), str(ROOT)])


def test_a_serve_that_is_ended_while_it_starts_says_so(job, tmp_path):
    with Processes(tmp_path) as processes:
        words = {"PYTHONPATH": path_with(tmp_path / "site", NEVER_LISTENS)}
        child = processes.fork_python(*COMMAND_LINE, "serve", str(job), name="serve", environment=words)
        wait_until(lambda: len(child.session) == 2, deadline_s=LONG_S, what="a loader that starts")
        child.send_signal(signal.SIGTERM)
        assert child.wait(deadline_s=LONG_S) == 0, child.report()
        assert child.stdout() == "ended by SIGTERM before the loaders listened\n" and "LoaderLost" not in child.stderr()


def test_a_node_worker_that_waits_for_a_slow_loader_is_not_stuck(job, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", path_with(tmp_path / "site", ONLY_LOOKS))
    recipe = load_recipe(job)
    catalog = open_catalog(recipe, job.parent)
    read, look, is_slow = ServedCatalogs.read, ProcessWatch.look, threading.Event()
    beats, seen = list[ProcessBeat](), set[int]()

    def noted(self, beat, evidence, *, now_s):
        beats.extend(filter(None, [beat]))
        return look(self, beat, evidence, now_s=now_s)

    def slow(self, fingerprint, arrays):
        """Wait until the worker, which waits for this, has said again and again that it goes on."""
        if not is_slow.is_set():
            is_slow.set()
            first = len(beats)
            wait_until(lambda: len(progress_since(first)) > 4, deadline_s=120, what=lambda: str(beats[first:]))
            seen.update(progress_since(first))
        return read(self, fingerprint, arrays)

    def progress_since(first):
        return {beat.progress for beat in beats[first:] if beat.is_asked}

    monkeypatch.setattr(ProcessWatch, "look", noted)
    monkeypatch.setattr(ServedCatalogs, "read", slow)
    with running(catalog, job.parent, seed=recipe.seed) as server:
        loaders = {"where": "remote", "endpoints": server.endpoint}

        def program(loader, rank):
            take(loader, rank, None, steps=2)
            rank.result = loader.stats()["workers_lost"]

        [rank] = run_job(job, Topology(), program=program, loaders=loaders)
    assert len(seen) > 4 and rank.result == 0
    assert same_microbatches(rank.microbatches, run_job(job, Topology(), steps=2)[0].microbatches)


def test_images_in_files_that_rows_name_are_refused_by_name(tmp_path):
    vision = {"items": "image", "sizes": "patches", "decode_at": "worker", "model": SMALL_MODEL}
    write_project(tmp_path, ["parquet", "paths"], modules={"vision": vision})
    with pytest.raises(OptionError, match=r"rows name files of images \(source s1\), which"):
        run_job(tmp_path / "recipe.yaml", Topology(), steps=1, loaders={"where": "remote", "endpoints": "nowhere"})
