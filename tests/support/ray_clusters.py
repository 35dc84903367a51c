"""A Ray cluster of several nodes on this machine, and the actors that run on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.process_table import command_of, running
from tests.support.processes import wait_until

RAY_MARKS = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
"""Ray warns by itself; warnings of ours stay errors."""
TRIES = 4
"""Ray waits 30 s for a node of its own, which a busy machine may not give it."""
END_S = 120.0
ONE_MACHINE = {
    "node_ip_address": "127.0.0.1",
    "object_store_memory": 78 << 20,  # about the least that Ray takes; no data of ours are in it
    "include_log_monitor": False,
}
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def started_cluster(*, nodes: int, cpu: int) -> Iterator[Any]:
    """A head that runs no loaders, and some nodes with some processors each; nothing of them is left at the end."""
    from ray.cluster_utils import Cluster

    shared = _shared_memory()
    # Names of Ray's sockets are longer than a folder of pytest's leaves room for.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        head = {"num_cpus": 0, "include_dashboard": False, **ONE_MACHINE}
        found = _tried(lambda: Cluster(initialize_head=True, head_node_args=head))
        try:
            for _ in range(nodes):
                add_node(found, cpu)
            yield found
        finally:
            found.shutdown()
            wait_until(
                lambda: not processes_of(folder),
                deadline_s=END_S,
                what=lambda: f"end of the cluster: {[command_of(pid) for pid in processes_of(folder)]}",
            )
    assert not _shared_memory() - shared


def add_node(cluster: Any, cpu: int) -> None:
    """Another node with so many processors."""
    _tried(lambda: cluster.add_node(num_cpus=cpu, **ONE_MACHINE))


def processes_of(folder: str) -> list[int]:
    """Process ids of a cluster, and of what its actors have started: all write into its folder, or name it."""
    return [
        each.pid
        for each in running()
        if each.pid != os.getpid() and (folder in command_of(each.pid) or _output_of(each.pid).startswith(folder))
    ]


def _output_of(pid: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    return ""


def _shared_memory() -> set[str]:
    """Names of Ray's segments."""
    return {path.name for path in SHARED_MEMORY.glob("plasma*")}


def _tried(start: Any) -> Any:
    for left in reversed(range(TRIES)):
        try:
            return start()
        except (Exception, SystemExit) as error:
            if not left or not (isinstance(error, SystemExit) or "imed out" in str(error)):
                raise
    return None


def loader_actors() -> list[int]:
    """Process ids of the actors that the cluster runs for us."""
    return [pid for pid in processes_of(os.environ["RAY_TMPDIR"]) if command_of(pid).startswith("ray::LoaderActor")]


def remove_node_with_actor(cluster: Any) -> None:
    """End a node that has one of them; which nodes these are is for Ray to choose."""
    actors, parents = {*loader_actors()}, {each.pid: each.parent for each in running()}
    owners = {parents[pid] for pid in actors if pid in parents}
    cluster.remove_node(
        next(
            node
            for node in cluster.worker_nodes
            if any(one.process.pid in owners for one in node.all_processes["raylet"])
        )
    )
