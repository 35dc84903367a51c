"""A Ray cluster of several nodes on this machine, and the actors that run on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.process_table import command_of, running

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


@contextmanager
def started_cluster(*, nodes: int, cpu: int) -> Iterator[Any]:
    """A head that runs no loaders, and some nodes with some processors each."""
    from ray.cluster_utils import Cluster

    found = _tried(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}))
    try:
        for _ in range(nodes):
            _tried(lambda: found.add_node(num_cpus=cpu))
        found.wait_for_nodes()
        yield found
    finally:
        found.shutdown()


def _tried(start: Any) -> Any:
    for left in reversed(range(TRIES)):
        try:
            return start()
        except (Exception, SystemExit) as error:
            if not left or not (isinstance(error, SystemExit) or "imed out" in str(error)):
                raise
    return None


def loader_actors() -> list[int]:
    """Process ids of the actors that Ray runs for us."""
    return [each.pid for each in running() if command_of(each.pid).startswith("ray::LoaderActor")]
