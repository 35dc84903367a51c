"""Section "Runs of ranks" of docs/formats.md, written again from its text.

In: tokens of samples by number, and the numbers of a layout. Out: bins, what they cost, and the plan digest. Nothing
here imports torchmix or numpy.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class BookRuns:
    """What the schedule depends on beside the samples."""

    per_token: int
    per_pair: int
    per_exchanged: int
    per_microbatch: int
    rank_tokens: int
    align: int
    sizes: tuple[int, ...]
    ranks: int
    stages: int = 1
    microbatches_of: int = 1

    def pad(self, n: int, s: int) -> int:
        multiple = self.align * (2 * s if s > 1 else 1)
        return -(-n // multiple) * multiple

    def fits(self, n: int, s: int) -> bool:
        return self.pad(n, s) <= self.rank_tokens * s

    def w(self, n: int, s: int) -> int:
        padded = self.pad(n, s)
        return -(-(self.per_token * padded + self.per_pair * n * n) // s) + self.per_exchanged * (padded // s) * (s - 1)

    def cost(self, rows: list[int]) -> int:
        return sum(rows) + (self.stages - 1) * max(rows) + self.per_microbatch * len(rows)


class Bin(NamedTuple):
    """A run's share of a microbatch."""

    size: int
    samples: list[int]
    """In the order in which they came."""

    def load(self, runs: BookRuns, tokens: list[int]) -> int:
        return sum(runs.w(tokens[i], self.size) for i in self.samples)


Rows = list[list[Bin]]


def able(runs: BookRuns, n: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes that hold a sample."""
    return [s for s in sizes if runs.fits(n, s)]


def fill(runs: BookRuns, tokens: list[int], sizes: tuple[int, ...], samples: list[int], limit: int) -> list[Bin]:
    """A microbatch within a limit; takes its samples out of those that wait, which come longest first."""
    row: list[Bin] = []
    left = runs.ranks
    for first in list(samples):
        if first not in samples:
            continue
        size = next((s for s in able(runs, tokens[first], sizes) if runs.w(tokens[first], s) <= limit), left + 1)
        if size > left:
            continue
        here, load, room = Bin(size, []), 0, runs.rank_tokens * size
        for i in list(samples):
            more, takes = runs.w(tokens[i], size), runs.pad(tokens[i], size)
            if load + more <= limit and takes <= room:
                here.samples.append(i)
                samples.remove(i)
                load, room = load + more, room - takes
        row.append(here)
        left -= size
    return row


def in_rows(runs: BookRuns, tokens: list[int], sizes: tuple[int, ...], target: int) -> Rows:
    """Microbatches, about as many as the target says."""
    waiting = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    rows: Rows = []
    while waiting:
        if len(rows) == target:
            target += runs.microbatches_of
        of = [able(runs, tokens[i], sizes) for i in waiting]
        least = max(min(runs.w(tokens[i], s) for s in able) for i, able in zip(waiting, of, strict=True))
        work = sum(min(s * runs.w(tokens[i], s) for s in able) for i, able in zip(waiting, of, strict=True))
        own = sum(runs.pad(tokens[i], able[0]) for i, able in zip(waiting, of, strict=True))
        left = max(target - len(rows), -(-own // (runs.rank_tokens * runs.ranks)))
        if left == 1:
            start = max(least, -(-work // runs.ranks))
            for k in ABOVE:
                rest = list(waiting)
                row = fill(runs, tokens, sizes, rest, start + start * k // 64)
                if not rest:
                    return [*rows, row]
        rows.append(fill(runs, tokens, sizes, waiting, max(least, -(-work // (runs.ranks * max(left, 2))))))
    return rows + [[] for _ in range(-len(rows) % runs.microbatches_of)]


ABOVE = (0, 1, 2, 4, 8, 16, 32, 64)


def maxima(runs: BookRuns, tokens: list[int], rows: Rows) -> list[int]:
    return [max((each.load(runs, tokens) for each in row), default=0) for row in rows]


def bound_of(runs: BookRuns, tokens: list[int], sizes: tuple[int, ...]) -> int:
    of = [[(s, runs.w(n, s)) for s in able(runs, n, sizes)] for n in tokens]
    least = max(min(w for _, w in each) for each in of)
    work = sum(min(s * w for s, w in each) for each in of)
    alone = sum(min(w for _, w in each) for each in of if 2 * each[0][0] > runs.ranks)
    own = sum(runs.pad(n, each[0][0]) for n, each in zip(tokens, of, strict=True))
    rows = -(-own // (runs.rank_tokens * runs.ranks))
    even = max(-(-work // runs.ranks), alone, least)
    return max(even + (runs.stages - 1) * least + runs.per_microbatch * rows, 1)


def by_number(runs: BookRuns, tokens: list[int], size: int) -> Rows:
    bins: list[Bin] = []
    used = runs.rank_tokens * size
    for i, n in enumerate(tokens):
        if used + runs.pad(n, size) > runs.rank_tokens * size:
            bins.append(Bin(size, []))
            used = 0
        bins[-1].samples.append(i)
        used += runs.pad(n, size)
    width = runs.ranks // size
    rows = [bins[at : at + width] for at in range(0, len(bins), width)]
    return rows + [[] for _ in range(-len(rows) % runs.microbatches_of)]


def cheapest(runs: BookRuns, tokens: list[int]) -> Rows:
    """The schedule of a step."""
    holding = [s for s in runs.sizes if all(runs.fits(n, s) for n in tokens)]
    best: Rows | None = None
    cost = 0
    for sizes in (runs.sizes, *((s,) for s in holding)):
        if best is not None and bound_of(runs, tokens, sizes) >= cost:
            continue
        of = [able(runs, n, sizes)[0] for n in tokens]
        own = sum(map(runs.pad, tokens, of))
        if len(sizes) == 1 and max(own, sum(sizes[0] * runs.w(n, sizes[0]) for n in tokens)) >= 1 << 62:
            continue
        rows = -(-own // (runs.rank_tokens * runs.ranks))
        fewest = -(-rows // runs.microbatches_of)
        tried = [in_rows(runs, tokens, sizes, (fewest + k) * runs.microbatches_of) for k in range(4)]
        if len(sizes) == 1:
            tried.append(by_number(runs, tokens, sizes[0]))
        for each in tried:
            found = runs.cost(maxima(runs, tokens, each))
            if best is None or found < cost:
                best, cost = each, found
    assert best is not None
    return best


class Placed(NamedTuple):
    """A step in runs of ranks."""

    bins: list[tuple[int, int, int]]
    """Microbatch, first rank and size of each."""
    bin_of_sample: list[int]
    padded: list[int]
    cost: int
    by_number_cost: int
    lower_bound: int

    def digest(self, order: bytes, dp: int, cp: int) -> str:
        message = order + struct.pack("<qqq", dp, cp, len(self.bins))
        for one in self.bins:
            message += struct.pack("<qqq", *one)
        for number, padded in zip(self.bin_of_sample, self.padded, strict=True):
            message += struct.pack("<qq", number, padded)
        return hashlib.sha256(message).digest()[:8].hex()


def placed_in_runs(runs: BookRuns, tokens: list[int]) -> Placed:
    """The schedule of a step; `tokens` of each sample by number."""
    shortest = next(s for s in runs.sizes if all(runs.fits(n, s) for n in tokens))
    plain_cost = runs.cost(maxima(runs, tokens, by_number(runs, tokens, shortest)))
    full = []
    for row in cheapest(runs, tokens):
        idle = runs.ranks - sum(each.size for each in row)
        full.append([*row, *(Bin(runs.sizes[0], []) for _ in range(idle // runs.sizes[0]))])
    full.sort(key=lambda row: -max(maxima(runs, tokens, [row])))
    in_time = [*reversed(range(1, len(full), 2)), *range(0, len(full), 2)]
    bins: list[tuple[int, int, int]] = []
    bin_of, padded = [0] * len(tokens), [0] * len(tokens)
    for microbatch, row in enumerate(in_time):
        rank = 0
        last = len(tokens)
        of_row = full[row]
        for each in sorted(of_row, key=lambda b: (-b.size, -b.load(runs, tokens), min(b.samples, default=last))):
            for i in each.samples:
                bin_of[i], padded[i] = len(bins), runs.pad(tokens[i], each.size)
            bins.append((microbatch, rank, each.size))
            rank += each.size
    bound = bound_of(runs, tokens, runs.sizes)
    return Placed(bins, bin_of, padded, runs.cost(maxima(runs, tokens, full)), plain_cost, bound)
