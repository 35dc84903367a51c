"""How long others may be silent, and how often the job's one store is asked.

In: the limits of a job, how many ranks it has and how many of them share a host. Out: the seconds between two beats and
between two looks of a rank. Must hold: all ranks together ask the store at most `MOST_REQUESTS_S` times a second, and
each host finds its share by itself. Cost: none.

Who is watched from another host beats fast, and who watches another host looks fast. The others are looked at by the
kernel twice a second, so beats tell of them only whether their Python runs, and come slowly:

    host A            host B            host C
    0  1  2  3  --->  4  5  6  7  --->  8 ...       ---> a fast look at a fast beat
    B--L  slow looks at slow beats, one for each pair of ranks of a host
"""

from __future__ import annotations

import msgspec


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
    """How long the rank that hosts the store stays for ranks that have not closed yet."""


SHORTEST_PATIENCE_S = 3.0
MOST_REQUESTS_S = 1950.0
"""What the job's one store is asked for in a second, by all ranks together; 2,000 with what is asked now and then. A
request is a message to the store: torch sends two for a `get`, which waits first, and one for a `set` and a
`compare_set`."""
REQUESTS_A_BEAT = 1.0
REQUESTS_A_LOOK = 3.0
"""The abort key, the beat of the next rank, and that of the store's host."""
REQUESTS_A_FAST_LOOK = 2.25
"""As a look; that of the store's host each fourth time."""
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
    share = MOST_REQUESTS_S * ranks_of_host / world_size
    fast = REQUESTS_A_BEAT + REQUESTS_A_FAST_LOOK
    slow = others * (REQUESTS_A_BEAT + REQUESTS_A_LOOK)
    # What fast ones leave at their best pace, at least what suffices for `SLOW_S`, at most half of a small share.
    for_slow = max(share - fast / poll_s, min(slow / SLOW_S, share / 2)) if others else 0.0
    fast_s = max(poll_s, fast / (share - for_slow))
    return Pace(fast_s=fast_s, slow_s=max(fast_s, slow / for_slow) if others else fast_s)
