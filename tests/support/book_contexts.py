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


def fill(runs: BookRuns, tokens: list[int], samples: list[int], limit: int | None) -> Rows:
    """Bins within a limit, in microbatches."""
    waiting = sorted(samples, key=lambda i: (-tokens[i], i))
    bins: list[Bin] = []
    while waiting:
        first = tokens[waiting[0]]
        able = [s for s in runs.sizes if runs.fits(first, s) and (limit is None or runs.w(first, s) <= limit)]
        here, load, room = Bin(able[0], []), 0, runs.rank_tokens * able[0]
        for i in list(waiting):
            more, takes = runs.w(tokens[i], here.size), runs.pad(tokens[i], here.size)
            if (limit is None or load + more <= limit) and takes <= room:
                here.samples.append(i)
                waiting.remove(i)
                load, room = load + more, room - takes
        bins.append(here)
    order = sorted(range(len(bins)), key=lambda b: (-bins[b].load(runs, tokens), b))
    rows: Rows = []
    while order:
        left, row = runs.ranks, []
        for b in list(order):
            if bins[b].size <= left:
                row.append(bins[b])
                order.remove(b)
                left -= bins[b].size
        rows.append(row)
    return rows


def maxima(runs: BookRuns, tokens: list[int], rows: Rows) -> list[int]:
    return [max(each.load(runs, tokens) for each in row) for row in rows]


def least(runs: BookRuns, tokens: list[int], samples: list[int]) -> tuple[int, int]:
    """The least limit, and the least work."""
    loads = [[(s, runs.w(tokens[i], s)) for s in runs.sizes if runs.fits(tokens[i], s)] for i in samples]
    return max(min(w for _, w in of) for of in loads), sum(min(s * w for s, w in of) for of in loads)


ABOVE = (1, 2, 4, 8, 16, 32, 64)


def searched(runs: BookRuns, tokens: list[int]) -> Rows:
    every = list(range(len(tokens)))
    low, work = least(runs, tokens, every)
    best = fill(runs, tokens, every, None)
    fewest = len(best)
    for count in range(fewest, fewest + 4):
        start = max(low, -(-work // (runs.ranks * count)))
        for k in ABOVE:
            rows = fill(runs, tokens, every, start + start * k // 64)
            if runs.cost(maxima(runs, tokens, rows)) < runs.cost(maxima(runs, tokens, best)):
                best = rows
            if len(rows) <= count:
                break
    found = []
    for row in best:
        mine = [i for each in row for i in each.samples]
        low, work = least(runs, tokens, mine)
        start = max(low, -(-work // runs.ranks))
        for k in ABOVE:
            limit = start + start * k // 64
            if limit >= max(each.load(runs, tokens) for each in row):
                break
            alone = fill(runs, tokens, mine, limit)
            if len(alone) == 1:
                row = alone[0]
                break
        found.append(row)
    return sorted(found, key=lambda row: -max(maxima(runs, tokens, [row])))


def by_number(runs: BookRuns, tokens: list[int]) -> Rows:
    size = max(next(s for s in runs.sizes if runs.fits(n, s)) for n in tokens)
    bins: list[Bin] = []
    used = runs.rank_tokens * size
    for i, n in enumerate(tokens):
        if used + runs.pad(n, size) > runs.rank_tokens * size:
            bins.append(Bin(size, []))
            used = 0
        bins[-1].samples.append(i)
        used += runs.pad(n, size)
    width = runs.ranks // size
    return [bins[at : at + width] for at in range(0, len(bins), width)]


def with_all_ranks(runs: BookRuns, tokens: list[int], row: list[Bin]) -> list[Bin]:
    """No rank is idle."""
    made = sorted(row, key=lambda each: -each.load(runs, tokens))
    idle = runs.ranks - sum(each.size for each in row)
    ready = [(-each.load(runs, tokens), number, each) for number, each in enumerate(made)]
    number, done = len(ready), []
    while ready and idle:
        one = min(ready, key=lambda entry: entry[:2])
        ready.remove(one)
        each = one[2]
        places = sorted(each.samples, key=lambda i: (-tokens[i], i))
        wider = [s for s in runs.sizes if s > each.size][:1]
        if len(places) > 1 and each.size <= idle:
            parts = [Bin(each.size, places[0::2]), Bin(each.size, places[1::2])]
        elif wider and wider[0] - each.size <= idle and _pays(runs, tokens, each, wider[0]):
            parts = [Bin(wider[0], each.samples)]
        else:
            done.append(each)
            continue
        idle -= sum(part.size for part in parts) - each.size
        for part in parts:
            ready.append((-part.load(runs, tokens), number, part))
            number += 1
    return done + [each for _, _, each in ready] + [Bin(runs.sizes[0], []) for _ in range(idle // runs.sizes[0])]


def _pays(runs: BookRuns, tokens: list[int], each: Bin, size: int) -> bool:
    wider = Bin(size, each.samples)
    takes = sum(runs.pad(tokens[i], size) for i in each.samples)
    return wider.load(runs, tokens) < each.load(runs, tokens) and takes <= runs.rank_tokens * size


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
    plain, best = by_number(runs, tokens), searched(runs, tokens)
    plain_cost = runs.cost(maxima(runs, tokens, plain))
    if plain_cost < runs.cost(maxima(runs, tokens, best)):
        best = sorted(plain, key=lambda row: -max(maxima(runs, tokens, [row])))
    full = [with_all_ranks(runs, tokens, row) for row in best]
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
    low, work = least(runs, tokens, list(range(len(tokens))))
    first = [next(s for s in runs.sizes if runs.fits(n, s)) for n in tokens]
    alone = sum(
        min(runs.w(n, s) for s in runs.sizes if runs.fits(n, s))
        for n, s0 in zip(tokens, first, strict=True)
        if 2 * s0 > runs.ranks
    )
    rows = -(-sum(map(runs.pad, tokens, first)) // (runs.rank_tokens * runs.ranks))
    bound = max(-(-work // runs.ranks), alone, low) + (runs.stages - 1) * low + runs.per_microbatch * rows
    return Placed(bins, bin_of, padded, runs.cost(maxima(runs, tokens, full)), plain_cost, max(bound, 1))
