"""What is said of a worker that was lost."""

from __future__ import annotations

import re
import signal

import pytest

from torchmix.steps.worker.keeper import lost_with


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
