"""What a worker process may leave running when it ends: threads that no one waits for, in C++ code."""

from __future__ import annotations

import threading

import torch


def leave_busy_threads(num_threads: int, seconds_until_end: float = 0.2) -> None:
    """Return while threads go in and out of torch's operations, which give up the interpreter's lock."""

    def work() -> None:
        values = torch.ones(1 << 16)
        while True:
            values.add_(1)

    for _ in range(num_threads):
        threading.Thread(target=work, daemon=True).start()
    threading.Event().wait(seconds_until_end)
