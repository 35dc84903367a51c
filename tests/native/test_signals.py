"""A signal that comes during a native call ends the process as it ends any Python, after the call."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.deadlines import LONG_S
from tests.support.forks import ROOT
from tests.support.native import built_library

pytestmark = pytest.mark.system

CALLS = """
import signal
import numpy as np
from torchmix.native.load import is_native, num_calls
from torchmix.reader.piece_copy import write_padding
from torchmix.reader.protocol import Filling, WantedPieces

assert is_native()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
none = np.zeros(0, np.int64)
pieces = WantedPieces.end_to_end(source=0, row=none, epoch=0, start=0, tokens=none)
outs = [Filling(np.zeros(1 << 23, np.int32), np.zeros(1 << 23, np.int32))]
write_padding(pieces, outs)
assert num_calls()["tm_gather"] == 1
print("up", flush=True)
while True:
    write_padding(pieces, outs)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_a_signal_during_native_calls_ends_the_process(number: signal.Signals) -> None:
    built_library()  # or this test is skipped
    with subprocess.Popen(
        [sys.executable, "-c", CALLS], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(number)
            _, said = process.communicate(timeout=LONG_S)
        finally:
            process.kill()
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT), said
