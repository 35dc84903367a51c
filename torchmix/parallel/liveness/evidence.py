"""Which process a rank is, what the kernel says of it, and what ranks write for each other."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal, Protocol

import msgspec

# --- How long others may be silent, and how often the job's one store is asked.
#
# All ranks together ask the store at most `MOST_REQUESTS_S` times a second; each host finds by itself what it may ask.
#
# Who is watched from another host beats fast, and who watches another host looks fast. The others are looked at by the
# kernel twice a second, so beats tell of them only whether their Python runs, and come slowly:
#
#     host A            host B            host C
#     0  1  2  3  --->  4  5  6  7  --->  8 ...       ---> a fast look at a fast beat
#     B--L  slow looks at slow beats, one for each pair of ranks of a host


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of liveness, in seconds. The defaults end a job within 15 s of a lost rank."""

    poll_s: float = 0.5
    """Between two beats, and between two looks, in a job whose store can bear it."""
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
    """How long the rank that serves the store stays for ranks that have not closed yet, or not read of a loss: one that
    waits for a processor would else name the store in the place of the lost rank."""


SHORTEST_PATIENCE_S = 3.0
MOST_REQUESTS_S = 1950.0
"""What the job's one store is asked for in a second, by all ranks together; 2,000 with what is asked now and then. A
request is a message to the store: torch sends two for a `get`, which waits first, and one for a `set` and a
`compare_set`."""
REQUESTS_A_BEAT = 1.0
REQUESTS_A_LOOK = 3.0
"""The abort key, the beat of the next rank, and that of the rank that serves the store."""
REQUESTS_A_FAST_LOOK = 2.25
"""As a look; that of the rank that serves the store each fourth time."""
SLOW_S = 20.0
"""Between two beats that tell only whether Python runs, at most, while that leaves half of the requests to others."""
LONGEST_SILENCE_POLLS = 3.0
"""Beats that must be missed, however far apart they are."""


def patience_of(silence_s: float | None) -> Patience:
    """The limits of a job in which another host, or the store, may be silent for `silence_s` (3 or more).

    Ranks on this host may then be silent as long. None: the defaults.
    """
    if silence_s is None:
        return Patience()
    return Patience(remote_s=silence_s, store_s=silence_s, stall_s=max(Patience().stall_s, silence_s))


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between two requests of a kind."""

    fast_s: float
    """Between beats of a rank that is watched from another host, and looks of one that watches another host."""
    slow_s: float
    """Between all other beats, and all other looks."""


def is_large(poll_s: float, *, world_size: int) -> bool:
    """Whether the store cannot bear that all ranks beat and look each `poll_s`."""
    return world_size * (REQUESTS_A_BEAT + REQUESTS_A_LOOK) > MOST_REQUESTS_S * poll_s


def pace_at_size(poll_s: float, *, world_size: int, ranks_of_host: int) -> Pace:
    """The pace of a job of this size.

    Args:
        poll_s: As in `Patience`; no pace is faster.
        world_size: Ranks of the job.
        ranks_of_host: Those that the kernel tells of each other, on the host of the rank that asks.
    """
    others = ranks_of_host - 1
    if not is_large(poll_s, world_size=world_size):
        return Pace(fast_s=poll_s, slow_s=poll_s)
    of_host = MOST_REQUESTS_S * ranks_of_host / world_size
    fast = REQUESTS_A_BEAT + REQUESTS_A_FAST_LOOK
    slow = others * (REQUESTS_A_BEAT + REQUESTS_A_LOOK)
    # What fast ones leave at their best pace, at least what suffices for `SLOW_S`, at most half of little.
    for_slow = max(of_host - fast / poll_s, min(slow / SLOW_S, of_host / 2)) if others else 0.0
    fast_s = max(poll_s, fast / (of_host - for_slow))
    return Pace(fast_s=fast_s, slow_s=max(fast_s, slow / for_slow) if others else fast_s)


# --- Which process a rank is, and what the kernel says of it.
#
# Cost: four small reads of /proc.

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
    fields = stat_fields(pid)
    started = fields[STARTED] if fields else ""
    return RankIdentity(host=socket.gethostname(), pid=pid, started=started, pid_space=pid_space)


def evidence_of_process(identity: RankIdentity) -> Evidence:
    """What the kernel says of a process on this host.

    Returns:
        "gone" also for a zombie, and where a later process has taken the pid; "unknown" for a process elsewhere.
    """
    if not identity_of_this_process().sees(identity):
        return "unknown"
    fields = stat_fields(identity.pid)
    if not fields or fields[STATE] in "ZXx" or fields[STARTED] != identity.started:
        return "gone"
    return "stopped" if fields[STATE] in "Tt" else "running"


def is_alive(pid: int, started: str) -> bool:
    """Whether a process of this host is there, and is the one that began then."""
    identity = msgspec.structs.replace(identity_of_this_process(), pid=pid, started=started)
    return evidence_of_process(identity) in ("running", "stopped")


def has_pulse(identity: RankIdentity) -> bool:
    """Whether the thread that beats is there, in a process of this host.

    It ends when its rank is done, knows of a loss, or has ended.
    """
    return Path(f"/proc/{identity.pid}/task/{identity.pulse}").exists()


STATE, PARENT, USER_TICKS, SYSTEM_TICKS, STARTED = 0, 1, 11, 12, 19
"""Places of fields in what `stat_fields` gives: a letter, then numbers."""


def stat_fields(pid: int, thread: int | None = None) -> list[str]:
    """What the kernel says of a process, or of one of its threads, in /proc/PID/stat; empty if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat").read_text()
    except OSError:
        return []
    # The name of the program, in parentheses, may hold spaces and parentheses itself.
    return text[text.rindex(")") + 2 :].split()


# --- What ranks write for each other into the job's store: beats, identities, one loss.
#
# No request waits for a key, and each is one message to the store; what is read was written by a rank of this job.
# Cost: a message each.


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank says again and again."""

    count: int
    """Grows with every beat."""
    step: int
    """Last step that the rank's loader delivered, -1 before the first."""
    is_done: bool
    """Whether the rank closed its loader; its last beat."""
    every_s: float = 0.0
    """When the next one comes, at the latest, if the rank is as it should be."""


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank that is lost, as all ranks read it."""

    rank: int
    """-1 for the launcher."""
    text: str
    """Who it is and how it was lost."""


class RecordStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write if the value is the expected one, or if nothing is expected and there is none; the value after it."""

    def add(self, key: str, amount: int, /) -> int:
        """Count; the sum."""


_beats = msgspec.json.Decoder(Beat)
_identities = msgspec.json.Decoder(RankIdentity)
_losses = msgspec.json.Decoder(Loss)
_encode = msgspec.json.encode

_NOTHING = "-"
"""No value of a key: under the abort key that nobody is lost."""


class Records:
    """One rank's hand in the store.

    All methods raise RuntimeError if the store is gone, and MsgspecError if what is read was not written by a rank.
    """

    def __init__(self, store: RecordStore) -> None:
        """Write, if no other rank has, that nobody is lost."""
        self._store = store
        self._identities: dict[int, RankIdentity] = {}
        store.compare_set("abort", "", _NOTHING)

    def write_beat(self, rank: int, beat: Beat) -> None:
        """In the place of the rank's last one."""
        self._store.set(f"beat/{rank}", _encode(beat).decode())

    def write_identity(self, rank: int, identity: RankIdentity) -> None:
        """After the first beat: a rank that is known has one."""
        self._store.set(f"who/{rank}", _encode(identity).decode())

    def identity(self, rank: int) -> RankIdentity | None:
        """Who a rank is; asked for until it is known."""
        if rank not in self._identities:
            if (found := self._read(f"who/{rank}")) is None:
                return None
            self._identities[rank] = _identities.decode(found)
        return self._identities[rank]

    def known_identity(self, rank: int) -> RankIdentity | None:
        """As far as it was asked for before."""
        return self._identities.get(rank)

    def read(self, rank: int) -> tuple[Beat | None, RankIdentity | None]:
        """The latest beat and the identity of a rank, None before it has opened its loader."""
        if (identity := self.identity(rank)) is None or (found := self._read(f"beat/{rank}")) is None:
            return None, None
        return _beats.decode(found), identity

    def loss(self) -> Loss | None:
        """The one that stands."""
        return None if (found := self._read("abort")) is None else _losses.decode(found)

    def write_loss(self, loss: Loss) -> Loss:
        """Write a loss unless there is one; the one that stands."""
        return _losses.decode(self._store.compare_set("abort", _NOTHING, _encode(loss).decode()))

    def say_that_it_ends(self, rank: int) -> None:
        """SIGTERM ends the rank."""
        self._store.set(f"ending/{rank}", "yes")

    def is_ending(self, rank: int) -> bool:
        """Whether SIGTERM ends the rank."""
        return self._read(f"ending/{rank}") is not None

    def count_farewells(self, more: int) -> int:
        """Add ranks that need the store no more; how many there are."""
        return self._store.add("farewells", more)

    def _read(self, key: str) -> bytes | None:
        # `get` and `check` would be two messages, and `get` waits for a key that is not there.
        found = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found
