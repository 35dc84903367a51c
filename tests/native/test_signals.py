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
from torchmix.native.calls import Fill
from torchmix.native.load import array_of, is_native, run

assert is_native()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
num = 1 << 23
one = np.zeros(1, np.int64)
arrays = {
    "values": np.zeros(num, np.uint16), "place": one, "length": np.full(1, num), "ends": np.ones(1, np.uint8),
    "successor": one, "tokens": np.zeros(num, np.int32), "labels": np.zeros(num, np.int32), "bad": one.copy(),
}
call = Fill(**{name: array_of(array, array.dtype) for name, array in arrays.items()}, value_type=2, no_loss=-100)
run(call)
print("up", flush=True)
while True:
    run(call)
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
