"""Is the next rank alive? The decision behind liveness, without threads, store or sockets.

In: the records of a rank (`RankIdentity` once, a `Beat` every poll), which the rank before it in the ring reads, with
times of this process' own clock. Out: a `Loss` when the watched rank is lost, else None.

A beat that does not change is silence, and silence has several meanings. On the same host the kernel knows which:

    gone       the process ended without a farewell: lost as soon as a second poll finds none
    stopped    SIGSTOP, a debugger, a frozen container: lost after `silence_s`
    running    alive, but Python does not run: a long call keeps the interpreter's lock; lost after `stall_s`
    unknown    another host or another container, so any of the above is possible: lost after `remote_s`

Invariants: a rank that said it is done is never lost, and its predecessor watches the rank after it. Silence grows by
at most two polls a look, so time in which this process itself did not run (stopped, or starved) does not count as
silence of others. Clocks of different hosts are never compared. Cost of a look: four small reads of /proc for a silent
rank, nothing otherwise.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

Evidence = Literal["running", "stopped", "gone", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Limits of liveness, in seconds. The defaults end a job within 15 s of a lost rank."""

    poll_s: float = 0.5
    """Between two polls. A rank sends the store about 4 requests a poll."""
    silence_s: float = 3.0
    """Silence of a process that is seen to be stopped."""
    remote_s: float = 11.0
    """Silence of a rank on another host. A call there that keeps the interpreter's lock for longer counts as a loss."""
    stall_s: float = 60.0
    """Silence of a process that is seen to run."""
    store_s: float = 11.0
    """Silence of the store. A shorter one is a hiccup of the network, and training may use another network."""
    join_s: float = 600.0
    """From this rank's first look to the first beat of another."""
    grace_s: float = 2.0
    """From noticing a lost rank to the end of this process."""
    farewell_s: float = 10.0
    """How long the rank that hosts the store stays for ranks that have not closed yet."""


SHORTEST_PATIENCE_S = 3.0
REQUESTS_A_POLL = 3.25
"""What a rank asks the store for in a poll: it writes its beat, reads the abort key and the beat of the next rank, and
each fourth time that of the store's host."""
MOST_REQUESTS_S = 2000.0
"""What the job's one store is asked for in a second, by all ranks together."""


def at_size(patience: Patience, world_size: int) -> Patience:
    """The limits of a job of this size: beats slow down, so that the store is asked `MOST_REQUESTS_S` times a second.

    Up to 300 ranks nothing changes. A rank that is gone is found by its host's own evidence as soon as in a small job,
    and all have read of it a poll later; the loss of a whole host is found by its silence, of three polls at least.
    """
    poll_s = max(patience.poll_s, REQUESTS_A_POLL * world_size / MOST_REQUESTS_S)
    if poll_s == patience.poll_s:
        return patience
    slowest_s = 3 * poll_s
    return replace(
        patience,
        poll_s=poll_s,
        remote_s=max(patience.remote_s, slowest_s),
        store_s=max(patience.store_s, slowest_s),
        stall_s=max(patience.stall_s, slowest_s),
    )


def patience_of(silence_s: float | None) -> Patience:
    """The limits of a job in which another host, or the store, may be silent for `silence_s` (3 or more).

    Ranks on this host may then be silent as long. None: the defaults.
    """
    if silence_s is None:
        return Patience()
    return Patience(remote_s=silence_s, store_s=silence_s, stall_s=max(Patience().stall_s, silence_s))


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which process a rank is."""

    host: str
    pid: int
    started: str
    """Kernel's start time of the process, which a later process with the same pid does not have. Empty if not known."""
    pid_space: str
    """Equal for processes that see each other's pids. Empty if not known."""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank says at each poll."""

    count: int
    """Grows with every beat."""
    step: int
    """Last step that the rank's loader delivered, -1 before the first."""
    is_done: bool
    """Whether the rank closed its loader; its last beat."""


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank that is lost, as all ranks read it."""

    rank: int
    """-1 for the launcher."""
    text: str
    """Who it is and how it was lost."""


class Silence:
    """Seconds for which a count has not changed, as far as this process could see."""

    def __init__(self, *, poll_s: float, now_s: float) -> None:
        self._longest_look_s = 2 * poll_s
        self._looked_s = now_s
        self._count: object = None
        self.seconds = 0.0

    def look(self, count: object, *, now_s: float) -> float:
        """Note the count at a time of this process' monotonic clock; the seconds of silence so far."""
        passed_s = min(now_s - self._looked_s, self._longest_look_s)
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
        self.target: int | None = rank
        """The rank to look at next; None when all others are done."""
        self._advance(now_s)

    def look(self, beat: Beat | None, identity: RankIdentity | None, *, now_s: float) -> Loss | None:
        """Judge the target.

        Args:
            beat: Its latest beat; None if there is none yet.
            identity: Who it is; None if there is no beat yet.
            now_s: This process' monotonic clock.

        Returns:
            How it was lost; None while it is not.
        """
        if self.target is None:
            return None
        silent_s = self._silence.look(None if beat is None else beat.count, now_s=now_s)
        if beat is None or identity is None:
            if silent_s < self._patience.join_s:
                return None
            return self._loss("", f"has not opened its loader for {silent_s:.0f} s; every rank of the job must")
        if beat.is_done:
            self._advance(now_s)
            return None
        if silent_s == 0.0:
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
        if silent_s < limits_s[evidence]:
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
        self.target = None if following == self._rank else following
        self._silence = Silence(poll_s=self._patience.poll_s, now_s=now_s)
        self._was_gone = False


def identity_of_this_process() -> RankIdentity:
    """Who this process is, as other ranks will name it."""
    return identity_of_process(os.getpid())


def identity_of_process(pid: int) -> RankIdentity:
    """Who a process is that this one sees, itself or a child, in a namespace of pids that both share."""
    pid_space = ""
    try:
        # Where /proc was mounted in another namespace its numbers are not those that others know.
        if Path("/proc/self").readlink().name == str(os.getpid()):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            # Only processes of one user: a /proc that hides those of others would make them seem gone.
            pid_space = f"{boot} {Path('/proc/self/ns/pid').readlink()} uid:{os.geteuid()}"
    except OSError:
        pass  # not Linux, or /proc is hidden: silence decides alone
    state = _stat_of(pid)
    return RankIdentity(host=socket.gethostname(), pid=pid, started=state[1] if state else "", pid_space=pid_space)


def evidence_of_process(identity: RankIdentity) -> Evidence:
    """What the kernel says of a process on this host.

    Returns:
        "gone" also for a zombie, and where a later process has taken the pid; "unknown" for a process elsewhere.
    """
    mine = identity_of_this_process()
    if not identity.pid_space or identity.pid_space != mine.pid_space or not identity.started:
        return "unknown"
    state = _stat_of(identity.pid)
    if state is None or state[0] in "ZXx" or state[1] != identity.started:
        return "gone"
    return "stopped" if state[0] in "Tt" else "running"


def loss_of_ended_rank(rank: int, identity: RankIdentity, beat: Beat) -> Loss:
    """The loss of a rank whose process is gone, and which has not said that it is done."""
    reason = f"was killed or ended without closing its loader; {text_of_step(beat.step)}"
    return Loss(rank=rank, text=f"rank {rank} ({identity}) {reason}")


def text_of_step(step: int) -> str:
    """How far a rank had come; `step` is -1 before its first step."""
    return f"the last step it delivered was {step}" if step >= 0 else "it had delivered no step"


def _stat_of(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process, from /proc/PID/stat; None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, may hold spaces and parentheses itself.
    numbers = text[text.rindex(")") + 2 :].split()
    return numbers[0], numbers[19]
