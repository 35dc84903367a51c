"""What a process does that works for a rank: its work, then its end, with the exit code of that."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

PROGRAM = """
import signal, socket, sys
from torchmix.parallel.children import run_process
import pyarrow

def work(end):
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert pyarrow.cpu_count() == pyarrow.io_thread_count() == 3
    print("worked", flush=False)
    end.sendall(b"here")
    {ends}

run_process(work, int(sys.argv[1]), [signal.SIGUSR1], cpu=3)
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"), [("return 0", 0, ""), ("return 7", 7, ""), ("raise KeyError('x')", 1, "KeyError: 'x'")]
)
def test_a_process_ends_with_the_code_of_its_work(ends: str, code: int, said: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", PROGRAM.format(ends=ends), str(theirs.fileno())]
        found = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=120)
        theirs.close()
        assert ours.recv(8) == b"here" and ours.recv(8) == b"", "its end of the road is closed with it"
    assert found.returncode == code and found.stdout == "worked\n", "what it said is flushed"
    assert said in found.stderr and bool(found.stderr) == bool(said)
