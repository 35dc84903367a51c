"""A process that was started: how its end is told, and how long it is waited for."""

from __future__ import annotations

import signal
import socket
import subprocess
from typing import Any

from torchmix.parallel.children import ENDED, Child, text_of_loss


class Unending:
    """A process inside a call of a disk that does not answer: no signal ends it."""

    def kill(self) -> None:
        pass

    def wait(self, timeout_s: float | None = None) -> int:
        assert timeout_s is not None, "waited without limit"
        raise subprocess.TimeoutExpired("worker", timeout_s)


def test_a_process_that_no_signal_ends_is_not_waited_for_without_limit() -> None:
    ours, theirs = socket.socketpair()
    child: Any = Child.__new__(Child)
    child.road, child.process = ours, Unending()
    with theirs:
        assert child.end(0.0) == -signal.SIGKILL


def test_a_loss_is_told_with_what_ended_the_process() -> None:
    assert text_of_loss(ENDED, -signal.SIGBUS) == "has ended by signal SIGBUS"
    assert text_of_loss(ENDED, 3) == "has ended with exit code 3"
    assert text_of_loss("is stopped, for 3.0 s", -signal.SIGKILL) == "is stopped, for 3.0 s, and was killed"
