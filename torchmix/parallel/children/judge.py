"""Is a process that this one has started alive? The decision, without processes or sockets.

In: its beats, and what the kernel says of the process, with times of this process' clock. Out: how it was lost, else
None. Must hold: as ranks are judged (`parallel/liveness/ring.py`): never by time alone, and time in which this process
did not run itself is not held against others.

    gone       the process has ended
    stopped    SIGSTOP, a debugger, a frozen container: lost after `silence_s`
    running    it does not beat, or something is asked of it and nothing at all is done for that: lost after `stall_s`;
               a step that was made counts as done, and so does waiting for a processor

A process that has not begun to beat imports; that may take long on a busy machine. Cost: microseconds a look.
"""

from __future__ import annotations

import msgspec

from torchmix.parallel.liveness.evidence import Evidence
from torchmix.parallel.liveness.patience import Patience
from torchmix.parallel.liveness.ring import Silence


class ProcessBeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """What a process says once a second to whoever started it."""

    count: int
    """Grows with every beat."""
    is_asked: bool
    """Whether something that was asked of it is not done yet."""
    progress: int
    """Grows with whatever is done for that: a step or a request that is done, time of processors, a thread that waits
    for one, a look at something that is waited for."""


class ProcessWatch:
    """The eye of whoever started a process."""

    def __init__(self, *, patience: Patience, now_s: float) -> None:
        """`now_s` is when the process was started, by this process' monotonic clock."""
        self._patience = patience
        self._silence = Silence(poll_s=patience.poll_s, now_s=now_s)
        self._rest = Silence(poll_s=patience.poll_s, now_s=now_s)

    def look(self, beat: ProcessBeat | None, evidence: Evidence, *, now_s: float) -> str | None:
        """Judge the process.

        Args:
            beat: The latest; None if there is none yet.
            evidence: What the kernel says.
            now_s: This process' monotonic clock.

        Returns:
            How it was lost; None while it is not.
        """
        silent_s = self._silence.look(None if beat is None else beat.count, now_s=now_s)
        is_asked = beat is not None and beat.is_asked
        # A process that nobody asks may rest: each beat counts as progress.
        done = None if beat is None else (beat.progress if is_asked else ("rests", beat.count))
        rested_s = self._rest.look(done, now_s=now_s)
        if evidence == "gone":
            return "has ended"
        if evidence == "stopped":
            return f"is stopped, for {silent_s:.1f} s" if silent_s >= self._patience.silence_s else None
        limit_s = self._patience.join_s if beat is None else self._patience.stall_s
        if silent_s >= limit_s:
            return f"is silent for {silent_s:.0f} s: it runs, but Python in it does not"
        if rested_s >= self._patience.stall_s and is_asked:
            return f"has done nothing for {rested_s:.0f} s for what is waited for"
        return None
