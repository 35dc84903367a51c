from __future__ import annotations

import re
import signal
import socket

import pytest

from torchmix.steps.worker import client
from torchmix.steps.worker.channel import Channel
from torchmix.steps.worker.client import lost_with


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-signal.SIGKILL, "worker process 7, which reads for this rank, was ended by signal SIGKILL. .* memory"),
        (-signal.SIGBUS, "by signal SIGBUS: a file that it had mapped into memory was cut.*Run torchmix check"),
        (3, "with exit code 3. What it printed last says why"),
    ],
)
def test_what_ended_a_worker_is_told_with_what_to_do(code: int, says: str) -> None:
    assert re.search(says, str(lost_with(7, code)))


class Ended:
    """A process that has ended, of which a fork of the leader still holds the channel."""

    def poll(self) -> int:
        return 0


def test_a_process_that_has_ended_is_noticed_also_if_its_channel_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LOOK_S", 0.01)
    ours, theirs = map(Channel, socket.socketpair())
    theirs.send(b"last words")
    assert client._receive(ours, Ended()) == (b"last words", [])
    with pytest.raises(EOFError, match="worker process has ended"):
        client._receive(ours, Ended())
    ours.close()
    theirs.close()
