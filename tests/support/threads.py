"""The threads that torchmix has in this process now."""

from __future__ import annotations

import threading

STARTER = "torchmix-starter"
"""Starts all processes, and stays: to the kernel, the thread that started a process is the process' parent."""


EARLIER: set[threading.Thread] = set()
"""Threads that tests before this one have left in the process; `conftest.py` notes them."""


def own_threads() -> list[str]:
    """Names of torchmix's threads of this test that end with what they serve."""
    names = [thread.name for thread in threading.enumerate() if thread not in EARLIER]
    return [name for name in names if name.startswith("torchmix") and name != STARTER]
