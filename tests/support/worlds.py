"""A whole job inside one process: a thread per rank, joined under a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.support.deadlines import stretched

T = TypeVar("T")
R = TypeVar("R")


AFTER_FAILURE_S = 2.0
"""What ranks are given to end once one has failed: they may wait for it."""


def run_ranks(ends: Sequence[T], program: Callable[[T], R], *, deadline_s: float = 120.0) -> list[R]:
    """Run `program` once per rank, each in a thread, and return the results by rank.

    The first failure by rank is raised, also where others wait for that rank; a rank that is still running at the
    deadline, `stretched`, fails the test.
    """
    results: dict[int, R] = {}
    failures: dict[int, BaseException] = {}

    def run(rank: int, end: T) -> None:
        try:
            results[rank] = program(end)
        except BaseException as error:
            failures[rank] = error

    threads = [threading.Thread(target=run, args=(rank, end), daemon=True) for rank, end in enumerate(ends)]
    for thread in threads:
        thread.start()
    began_s, failed_s = time.monotonic(), None
    while any(thread.is_alive() for thread in threads) and time.monotonic() - began_s < stretched(deadline_s):
        for thread in threads:
            thread.join(0.2)
        if failures and failed_s is None:
            failed_s = time.monotonic()
        if failed_s is not None and time.monotonic() - failed_s > stretched(AFTER_FAILURE_S):
            break
    if failures:
        raise failures[min(failures)]
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not late, f"ranks {late} did not end within {deadline_s} s"
    return [results[rank] for rank in range(len(ends))]
