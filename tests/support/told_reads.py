"""Reads of files that fail or are late, in the processes that a test says.

In: a folder, named by CHAOS. Out: while it has a file `read-PID` with `eio` or `slow`, the reads of that process do so.
Runs as an interpreter starts, by a `sitecustomize` that the test puts on PYTHONPATH.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

HOOK = """
from tests.support.told_reads import install
install()
"""
SLOW_S = 0.1


def hooked(folder: Path) -> Mapping[str, str]:
    """The environment of processes whose reads obey a folder, which gets the hook, too."""
    (folder / "sitecustomize.py").write_text(HOOK)
    return {"CHAOS": str(folder), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def install() -> None:
    """Have reads of this process obey."""
    place, real = Path(os.environ["CHAOS"]) / f"read-{os.getpid()}", os.pread

    def pread(descriptor: int, num_bytes: int, offset: int) -> bytes:
        fault = place.read_text() if place.exists() else ""
        if fault == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "slow":
            time.sleep(SLOW_S)
        return real(descriptor, num_bytes, offset)

    os.pread = pread
