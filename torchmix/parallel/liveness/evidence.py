"""Which process a rank is, and what the kernel says of it.

In: the identity that a process gave of itself. Out: whether it runs, is stopped or has gone, and whether its pulse
beats. Must hold: nothing is said of a process on another host, in another namespace of pids, of another user, or of one
that has the pid of an earlier one. Cost: four small reads of /proc.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

import msgspec

Evidence = Literal["running", "stopped", "gone", "unknown"]


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which process a rank is."""

    host: str
    pid: int
    started: str
    """Kernel's start time of the process, which a later process with the same pid does not have. Empty if not known."""
    pid_space: str
    """Equal for processes that see each other's pids. Empty if not known."""
    pulse: int = 0
    """The kernel's number of the thread that beats; 0 where there is none."""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def sees(self, other: RankIdentity) -> bool:
        """Whether the kernel tells this process of the other one."""
        return bool(self.pid_space) and self.pid_space == other.pid_space and bool(other.started)


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
    if not identity_of_this_process().sees(identity):
        return "unknown"
    state = _stat_of(identity.pid)
    if state is None or state[0] in "ZXx" or state[1] != identity.started:
        return "gone"
    return "stopped" if state[0] in "Tt" else "running"


def has_pulse(identity: RankIdentity) -> bool:
    """Whether the thread that beats is there, in a process of this host.

    It ends when its rank is done, knows of a loss, or has ended.
    """
    return Path(f"/proc/{identity.pid}/task/{identity.pulse}").exists()


def _stat_of(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process, from /proc/PID/stat; None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, may hold spaces and parentheses itself.
    numbers = text[text.rindex(")") + 2 :].split()
    return numbers[0], numbers[19]
