"""What is said of a worker that was lost."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from typing import Any

import pytest

from torchmix.steps.worker.host import _Child, lost_with
from torchmix.steps.worker.messages import Channel


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-signal.SIGKILL, "worker process 7, which reads for this node, was ended by signal SIGKILL. .* memory"),
        (-signal.SIGBUS, "by signal SIGBUS: a file that it had mapped into memory was cut.*Run torchmix check"),
        (3, "with exit code 3. What it printed last says why"),
    ],
)
def test_what_ended_a_worker_is_told_with_what_to_do(code: int, says: str) -> None:
    assert re.search(says, str(lost_with(7, code)))


def test_a_worker_that_was_ended_because_it_hung_is_told_with_that() -> None:
    text = str(lost_with(7, -signal.SIGKILL, "is silent for 61 s: it runs, but Python in it does not"))
    assert "which reads for this node, is silent for 61 s" in text
    assert "does not answer" in text


class Unending:
    """A process inside a call of a disk that does not answer: no signal ends it."""

    def kill(self) -> None:
        pass

    def wait(self, timeout_s: float | None = None) -> int:
        assert timeout_s is not None, "waited without limit"
        raise subprocess.TimeoutExpired("worker", timeout_s)


def test_a_worker_that_no_signal_ends_is_not_waited_for_without_limit() -> None:
    ours, theirs = socket.socketpair()
    child: Any = _Child.__new__(_Child)
    child.channel, child.process = Channel(ours), Unending()
    with theirs:
        assert child.end(0.0) == -signal.SIGKILL
