"""Is the next rank alive? The decision behind liveness, without threads, store or sockets.

A beat that does not change is silence, and silence has several meanings. On the same host the kernel knows which:

    gone       the process ended without a farewell: lost as soon as a second look finds none
    stopped    SIGSTOP, a debugger, a frozen container: lost after `silence_s`
    running    alive, but Python does not run: a long call keeps the interpreter's lock; lost after `stall_s`
    unknown    another host or another container, so any of the above is possible: lost after `remote_s`

Invariants: a rank that said it is done is never lost, and its predecessor watches the rank after it. Who beats slowly
may be silent for three beats, and so may whoever is looked at slowly. Silence grows by at most two pauses a look, so
time in which this process itself did not run (stopped, or starved) does not count as silence of others. Clocks of
different hosts are never compared. Cost of a look: four small reads of /proc for a silent rank, nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

from torchmix.parallel.liveness.evidence import (
    LONGEST_SILENCE_POLLS,
    Beat,
    Evidence,
    Loss,
    Patience,
    RankIdentity,
    evidence_of_process,
)


class Silence:
    """Seconds for which a count has not changed, as far as this process could see."""

    def __init__(self, *, poll_s: float, now_s: float) -> None:
        """`poll_s` lies between two looks, `now_s` is the time of the first."""
        self.poll_s = poll_s
        self._looked_s = now_s
        self._count: object = None
        self.seconds = 0.0

    def look(self, count: object, *, now_s: float) -> float:
        """Note the count at a time of this process' monotonic clock; the seconds of silence so far."""
        # A look that comes late says that this process did not run, not that the other was silent for so long.
        passed_s = min(now_s - self._looked_s, 2 * self.poll_s)
        self._looked_s = now_s
        self.seconds = 0.0 if count != self._count else self.seconds + passed_s
        self._count = count
        return self.seconds


class RingWatch:
    """One rank's eye on the next rank that is not done."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        patience: Patience,
        now_s: float,
        evidence_of: Callable[[RankIdentity], Evidence] | None = None,
    ) -> None:
        """`now_s` is the time of the first look; `evidence_of` stands in for `evidence_of_process` in tests."""
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._evidence_of = evidence_of_process if evidence_of is None else evidence_of
        self._was_gone = False
        self._silence = Silence(poll_s=patience.poll_s, now_s=now_s)
        self._stop = Silence(poll_s=patience.poll_s, now_s=now_s)
        self.target: int | None = rank
        """The rank to look at next; None when all others are done."""
        self._advance(now_s)

    def look(
        self, beat: Beat | None, identity: RankIdentity | None, *, now_s: float, every_s: float | None = None
    ) -> Loss | None:
        """Judge the target.

        Args:
            beat: Its latest beat; None if there is none yet.
            identity: Who it is; None if there is no beat yet.
            now_s: This process' monotonic clock.
            every_s: Between this look and the last one, as it was meant; None: `poll_s` of the patience.

        Returns:
            How it was lost; None while it is not.
        """
        if self.target is None:
            return None
        every_s = self._patience.poll_s if every_s is None else every_s
        self._silence.poll_s = self._stop.poll_s = every_s
        silent_s = self._silence.look(None if beat is None else beat.count, now_s=now_s)
        if beat is None or identity is None:  # it has not joined: there is no process to ask the kernel about yet
            if silent_s < self._patience.join_s:
                return None
            return self._loss("", f"has not opened its loader for {silent_s:.0f} s; every rank of the job must")
        if beat.is_done:  # before any judgement: a rank that said so may end, and is never lost
            self._advance(now_s)
            return None
        if silent_s == 0.0:  # a new beat is proof enough, and costs no look at the process
            self._was_gone = False
            return None
        evidence = self._evidence_of(identity)
        if evidence == "gone":
            if self._was_gone:
                return loss_of_ended_rank(self.target, identity, beat)
            self._was_gone = True  # a farewell was written before it ended, so the next poll finds it
            return None
        patience = self._patience
        limits_s = {"running": patience.stall_s, "stopped": patience.silence_s, "unknown": patience.remote_s}
        # A rank that beats slowly, or is looked at slowly, may miss some beats. That a process is stopped is no guess,
        # since the kernel says it: there nothing counts but how long it is; a profiler does so for a moment.
        stopped_s = self._stop.look(beat.count if evidence == "stopped" else (beat.count, now_s), now_s=now_s)
        shortest_s = 0.0 if evidence == "stopped" else LONGEST_SILENCE_POLLS * max(every_s, beat.every_s)
        if (stopped_s if evidence == "stopped" else silent_s) < max(limits_s[evidence], shortest_s):
            return None
        state = {"stopped": ": the process is stopped", "running": ": it runs, but Python in it does not"}
        reason = f"silent for {silent_s:.1f} s{state.get(evidence, '')}; {text_of_step(beat.step)}"
        return self._loss(f" ({identity})", reason)

    def _loss(self, identity: str, reason: str) -> Loss:
        assert self.target is not None
        return Loss(rank=self.target, text=f"rank {self.target}{identity} {reason}")

    def _advance(self, now_s: float) -> None:
        """Watch the next rank that may not be done."""
        assert self.target is not None
        following = (self.target + 1) % self._world_size
        self.target = None if following == self._rank else following  # once around: all others are done
        # The silence of the new target begins now: until this look, its predecessor watched it.
        self._silence = Silence(poll_s=self._patience.poll_s, now_s=now_s)
        self._stop = Silence(poll_s=self._patience.poll_s, now_s=now_s)
        self._was_gone = False


def loss_of_ended_rank(rank: int, identity: RankIdentity, beat: Beat) -> Loss:
    """The loss of a rank whose process is gone, and which has not said that it is done."""
    reason = f"was killed or ended without closing its loader; {text_of_step(beat.step)}"
    return Loss(rank=rank, text=f"rank {rank} ({identity}) {reason}")


def text_of_step(step: int) -> str:
    """How far a rank had come; `step` is -1 before its first step."""
    return f"the last step it delivered was {step}" if step >= 0 else "by its last beat it had delivered no step"
