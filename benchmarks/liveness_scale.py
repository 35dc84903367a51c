"""Liveness in jobs of thousands of ranks: requests to the store, and how soon a death is named, by simulated clients.

    python benchmarks/liveness_scale.py [--ranks 64 512 4096] [--ranks-per-host 8] [--quick]

Every rank is a real `Liveness` over one store that counts, without its threads: it polls when its time has come, by a
clock of the simulation, and looks at its host between polls. A minute goes by, then a rank is killed, or a whole host.
What is said: requests a second in that minute, and the seconds from the death until the first rank has named it, and
until all that live have. The kernel's evidence is simulated: a rank sees the ranks of its own host alone.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

from torchmix.parallel import host_watch, liveness, ring

QUIET_S, LONGEST_S = 60.0, 120.0


class CountingStore:
    """A store in memory that counts what it is asked for."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_requests = 0

    def set(self, key: str, value: str) -> None:
        """As torch's."""
        self.num_requests += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """As torch's."""
        self.num_requests += 1
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        self.num_requests += 1
        return all(key in self.values for key in keys)

    def add(self, key: str, count: int) -> int:
        """As torch's."""
        self.num_requests += 1
        value = int(self.values.get(key, b"0")) + count
        self.values[key] = str(value).encode()
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's."""
        self.num_requests += 1
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values[key]


class _NoThread:
    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        """Do nothing."""


def simulate(world_size: int, ranks_per_host: int, killed: list[int], *, seed: int = 1) -> dict[str, float]:
    """Requests a second while all live; then the seconds until a death is named, and until all ranks know of it."""
    chance, store, now = random.Random(seed), CountingStore(), [0.0]
    dead: set[int] = set()
    current = [0]

    def identity() -> ring.RankIdentity:
        return ring.RankIdentity(host=f"h{current[0] // ranks_per_host}", pid=current[0], started="1", pid_space="1")

    def evidence(of: ring.RankIdentity) -> ring.Evidence:
        if of.host != f"h{current[0] // ranks_per_host}":
            return "unknown"
        return "gone" if of.pid in dead else "running"

    real = [(module, dict(vars(module))) for module in (liveness, ring, host_watch)]
    try:
        liveness.time = SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[assignment]
        liveness.threading = SimpleNamespace(  # type: ignore[assignment]
            Thread=_NoThread, Lock=liveness.threading.Lock, Event=liveness.threading.Event
        )
        liveness.atexit = SimpleNamespace(register=lambda *_: None)  # type: ignore[assignment]
        liveness.os = SimpleNamespace(write=lambda *_: 0, _exit=lambda _: None)  # type: ignore[assignment]
        liveness.Termination = lambda _: None  # type: ignore[assignment,misc]
        liveness.identity_of_this_process = identity
        ring.evidence_of_process = evidence
        host_watch.evidence_of_process = evidence
        ranks: list[liveness.Liveness] = []
        events: list[tuple[float, int, int]] = []
        for rank in range(world_size):
            current[0] = rank
            one = liveness.Liveness(store, rank=rank, world_size=world_size, store_host=0)  # type: ignore[arg-type]
            first = rank - rank % ranks_per_host
            one.listen_for_termination(range(first, min(first + ranks_per_host, world_size)))
            ranks.append(one)
            heapq.heappush(events, (chance.random() * one._patience.poll_s, 0, rank))
            if one._patience.poll_s > liveness.LOOK_S:
                heapq.heappush(events, (chance.random() * liveness.LOOK_S, 1, rank))
        begun = False
        before = named_s = all_s = requests_s = 0.0
        unaware = set(range(world_size)) - set(killed)
        while events and unaware and now[0] < QUIET_S + LONGEST_S:
            now[0], kind, rank = heapq.heappop(events)
            if not begun and now[0] >= QUIET_S / 2:
                begun, before = True, store.num_requests
            if not dead and now[0] >= QUIET_S:
                requests_s = (store.num_requests - before) / (QUIET_S / 2)
                dead = set(killed)
            one = ranks[rank]
            if rank in dead or one._lost is not None:
                continue
            current[0] = rank
            if kind == 0:
                one._poll()
            elif one._host_watch is not None and (loss := one._host_watch.look()) is not None:
                one._post(loss)
            if one._lost is not None:
                named_s = named_s or now[0] - QUIET_S
                unaware.discard(rank)
                all_s = now[0] - QUIET_S
            heapq.heappush(events, (now[0] + (one._patience.poll_s if kind == 0 else liveness.LOOK_S), kind, rank))
        poll_s = ranks[0]._patience.poll_s
    finally:
        for module, names in real:
            vars(module).update(names)
    return {
        "poll_s": poll_s,
        "requests_per_s": requests_s,
        "named_s": named_s,
        "all_know_s": all_s if not unaware else float("inf"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sizes = [64] if options.quick else options.ranks
    print("| ranks | killed | poll s | requests/s | first names it, s | all know, s |")
    print("|---|---|---|---|---|---|")
    found = []
    for size in sizes:
        victim = size // 2 + 1
        host = victim - victim % options.ranks_per_host
        for what, killed in (("a rank", [victim]), ("a host", [*range(host, host + options.ranks_per_host)])):
            one = simulate(size, options.ranks_per_host, killed)
            found.append({"ranks": size, "killed": what, **one})
            print(
                f"| {size} | {what} | {one['poll_s']:.1f} | {one['requests_per_s']:.0f} | {one['named_s']:.1f} | "
                f"{one['all_know_s']:.1f} |"
            )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
