"""What ended a worker process, in words.

In: its exit code. Out: an error that says what to do. Cost: none.
"""

from __future__ import annotations

import signal

from torchmix.errors import WorkerLost


def lost_with(pid: int, code: int, reason: str = "has ended") -> WorkerLost:
    """The error for a worker that is lost.

    Args:
        pid: Of its process.
        code: The exit code, negative for a signal.
        reason: How it was lost, where that was not by its own end.
    """
    if reason != "has ended":
        return WorkerLost(
            f"the worker process {pid}, which reads for this node, {reason}. A disk or a network that does not answer "
            f"may be behind it; restart from the last checkpoint"
        )
    how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
    if code >= 0:
        advice = ". What it printed last says why; restart from the last checkpoint"
    elif -code == signal.SIGBUS:
        advice = (
            ": a file that it had mapped into memory was cut, or the disk failed under it. Run torchmix check, which "
            "names changed files; then restart from the last checkpoint"
        )
    else:
        advice = (
            ". If the machine ran out of memory, lower look_ahead or the recipe's read.cache; then restart from the "
            "last checkpoint"
        )
    return WorkerLost(f"the worker process {pid}, which reads for this node, was ended {how}{advice}")
