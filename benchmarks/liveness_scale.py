"""Liveness in jobs of thousands of ranks: requests to the store, and how soon a death is named, by simulated clients.

    python benchmarks/liveness_scale.py [--ranks 64 512 4096] [--ranks-per-host 8] [--deaths 5] [--quick]

Every rank is a real `Pulse` over one store that counts, without its thread: it has its rounds when their time has
come, by a clock of the simulation. Two minutes go by, then a rank is killed, or a whole host, at a random moment. What
is said, as the mean and the longest of several deaths: requests a second in the minute before, and the seconds from
the death until the first rank has named it, and until all that live have. A request is a message to torch's store,
which gets two for a `get`. The kernel's evidence is simulated: a rank sees the ranks of its own host alone. Time that
messages travel, and that a busy machine lets threads wait, is not simulated.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

from torchmix.parallel.liveness import guard as host_watch
from torchmix.parallel.liveness import guard as pulse
from torchmix.parallel.liveness import ring
from torchmix.parallel.liveness.evidence import Evidence, Patience, RankIdentity, Records
from torchmix.parallel.liveness.guard import KnownLoss

QUIET_S, LONGEST_S = 120.0, 120.0


class CountingStore:
    """A store in memory that counts what it is asked for."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_requests = 0

    def set(self, key: str, value: str) -> None:
        """As torch's."""
        self.num_requests += 1
        self.values[key] = value.encode()

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
        return self.values.get(key, expected.encode())


class _NoThread:
    native_id = 1

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        """Do nothing."""


class _Silent(KnownLoss):
    """Writes nothing."""

    def declare(self, loss: ring.Loss) -> None:
        """Note it."""
        self.loss = self.loss or loss


def simulate(
    world_size: int, ranks_per_host: int, killed: list[int], *, seed: int = 1, quiet_s: float = QUIET_S
) -> dict[str, float]:
    """Requests a second while all live; then the seconds until a death is named, and until all ranks know of it."""
    chance, store, now = random.Random(seed), CountingStore(), [0.0]
    dead: set[int] = set()
    current = [0]
    ranks: list[pulse.Pulse] = []
    known = [_Silent(rank) for rank in range(world_size)]

    def identity() -> RankIdentity:
        host = f"h{current[0] // ranks_per_host}"
        return RankIdentity(host=host, pid=current[0], started="1", pid_space=host)

    def evidence(of: RankIdentity) -> Evidence:
        if of.host != f"h{current[0] // ranks_per_host}":
            return "unknown"
        return "gone" if of.pid in dead else "running"

    real = [(module, dict(vars(module))) for module in (pulse, ring, host_watch)]
    try:
        pulse.time = SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[assignment]
        pulse.threading = SimpleNamespace(Thread=_NoThread, Event=pulse.threading.Event)  # type: ignore[assignment]
        pulse.identity_of_this_process = identity
        ring.evidence_of_process = host_watch.evidence_of_process = evidence
        host_watch.has_pulse = lambda of: of.pid not in dead and known[of.pid].loss is None
        events: list[tuple[float, int]] = []
        for rank in range(world_size):
            current[0] = rank
            records = Records(store)
            first = rank - rank % ranks_per_host
            one = pulse.Pulse(records, known[rank], rank=rank, world_size=world_size, store_rank=0, patience=Patience())
            one.host_watch = host_watch.HostWatch(
                rank,
                range(first, min(first + ranks_per_host, world_size)),
                read=records.read,
                is_ending=records.is_ending,
                standing_loss=records.loss,
            )
            ranks.append(one)
            heapq.heappush(events, (chance.random(), rank))
        death_s = quiet_s + 20 * chance.random()
        begun = False
        before = named_s = all_s = requests_s = 0.0
        unaware = set(range(world_size)) - set(killed)
        while events and unaware and now[0] < quiet_s + LONGEST_S:
            now[0], rank = heapq.heappop(events)
            if not begun and now[0] >= quiet_s / 2:
                begun, before = True, store.num_requests
            if not requests_s and now[0] >= quiet_s:
                requests_s = (store.num_requests - before) / (quiet_s / 2)
            if not dead and now[0] >= death_s:
                dead = set(killed)
            if rank in dead:
                continue
            current[0] = rank
            ranks[rank].round()
            if known[rank].loss is not None:
                named_s = named_s or now[0] - death_s
                unaware.discard(rank)
                all_s = now[0] - death_s
                continue
            heapq.heappush(events, (now[0] + max(ranks[rank].pause_s, 1e-3), rank))
        pace = ranks[1].pace
    finally:
        for module, names in real:
            vars(module).update(names)
    return {
        "fast_s": pace.fast_s,
        "slow_s": pace.slow_s,
        "requests_per_s": requests_s,
        "named_s": named_s,
        "all_know_s": all_s if not unaware else float("inf"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sizes = [64] if options.quick else options.ranks
    print("| ranks | killed | beats s | requests/s | first names it, s: mean, longest | all know, s: mean, longest |")
    print("|---|---|---|---|---|---|")
    found = []
    for size in sizes:
        victim = size // 2 + 1
        host = victim - victim % options.ranks_per_host
        for what, killed in (("a rank", [victim]), ("a host", [*range(host, host + options.ranks_per_host)])):
            each = [simulate(size, options.ranks_per_host, killed, seed=seed) for seed in range(1, options.deaths + 1)]
            one = each[0]
            spans = {name: [death[name] for death in each] for name in ("named_s", "all_know_s")}
            found.append({**one, "ranks": size, "killed": what, **spans})
            print(
                f"| {size} | {what} | {one['fast_s']:.1f}, {one['slow_s']:.1f} | {one['requests_per_s']:.0f} | "
                + " | ".join(f"{sum(span) / len(span):.1f}, {max(span):.1f}" for span in spans.values())
                + " |",
                flush=True,
            )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
