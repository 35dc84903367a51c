from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from torchmix.errors import WorkerLost
from torchmix.stateful.worker import steps_of_torch


class BrokenIterator:
    """What torch's iterator looks like after its worker has ended."""

    def __init__(self, exit_code: int) -> None:
        self._workers = [SimpleNamespace(pid=7, exitcode=exit_code, join=lambda seconds: None)]
        self.is_shut_down = False

    def __iter__(self) -> BrokenIterator:
        return self

    def __next__(self) -> Any:
        raise RuntimeError("the queue is broken")

    def _shutdown_workers(self) -> None:
        self.is_shut_down = True


@pytest.mark.parametrize(
    ("exit_code", "says"),
    [
        (-signal.SIGKILL, "worker process 7, which reads for this rank, was ended by signal SIGKILL. .* memory"),
        (-signal.SIGBUS, "by signal SIGBUS: a file that it had mapped into memory was cut.*Run torchmix check"),
        (3, "with exit code 3"),
    ],
)
def test_what_ended_a_worker_is_told_with_what_to_do(exit_code, says):
    broken = BrokenIterator(exit_code)
    with pytest.raises(WorkerLost, match=says):
        next(steps_of_torch(lambda: broken))
    assert broken.is_shut_down


def test_an_error_of_a_worker_that_lives_is_its_own():
    with pytest.raises(RuntimeError, match="the queue is broken"):
        next(steps_of_torch(lambda: BrokenIterator(0)))
