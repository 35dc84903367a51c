"""The keys, hashes and orders of docs/formats.md, written again from its text: plain integers, one value at a time.

In: what the document names. Out: what it says comes out. Nothing here imports torchmix or numpy, and nothing is quick:
it is the stranger who re-implements the formats, so that a sentence of the document that is wrong fails a test.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

MASK = (1 << 64) - 1
PHI = 0x9E3779B97F4A7C15


def named_key(seed: int, *path: str | int) -> int:
    """Section "named_key"."""
    message = struct.pack("<q", seed)
    for part in path:
        if isinstance(part, str):
            message += b"s" + struct.pack("<q", len(part.encode())) + part.encode()
        else:
            message += b"i" + struct.pack("<q", part)
    digest = hashlib.blake2b(message, digest_size=8, person=b"torchmix-key-1").digest()
    return int.from_bytes(digest, "little")


def mix64(x: int) -> int:
    """Section "mix64"."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def hash_columns(key: int, *values: int) -> int:
    """Section "hash_columns", of one row."""
    state = key
    for value in values:
        state = mix64((state * PHI + value) & MASK)
    return state


def order_by(majors: Sequence[int], ties: Sequence[int], major_bits: int) -> list[int]:
    """Section "order_by"."""
    count = len(ties)
    index_bits = max(1, (count - 1).bit_length())
    hash_bits = 64 - major_bits - index_bits
    keys = []
    for i in range(count):
        key = majors[i] << (hash_bits + index_bits) | (ties[i] >> (64 - hash_bits)) << index_bits | i
        keys.append(key)
    return [key & ((1 << index_bits) - 1) for key in sorted(keys)]


def keyed_order(key: int, count: int) -> list[int]:
    """Section "keyed_order"."""
    return order_by([0] * count, [mix64((i * PHI + key) & MASK) for i in range(count)], 0)


def permute(x: int, n: int, key: int) -> int:
    """Section "permute"."""
    if n == 1:
        return 0
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    rounds = 10 if n < 64 else 6
    while True:
        left, right = x >> half, x & ((1 << half) - 1)
        for r in range(rounds):
            round_key = mix64((key + PHI * (r + 1)) & MASK)
            left, right = right, left ^ (mix64((right * PHI + round_key) & MASK) >> (64 - half))
        x = left << half | right
        if x < n:
            return x


def integer_shares(shares: Mapping[str, Fraction]) -> dict[str, int]:
    """Section "integer shares"."""
    names = sorted(shares)
    total = sum(shares.values(), Fraction(0))
    exact = {name: shares[name] / total * 2**32 for name in names}
    given = {name: max(int(exact[name]), 1) if exact[name] > 0 else 0 for name in names}
    missing = 2**32 - sum(given.values())
    for name in sorted(names, key=lambda name: (given[name] - exact[name], name))[: max(missing, 0)]:
        given[name] += 1
    if missing < 0:
        given[max(names, key=lambda name: (given[name], name))] += missing
    return given


def bound(part: Fraction, num_rows: int) -> int:
    """Section "Parts": where a part of the rows begins or ends."""
    return round(part.numerator / part.denominator * float(num_rows))


def split_bounds(weights: Sequence[float], part: int) -> tuple[Fraction, Fraction]:
    """Section "Parts": where part 0, 1 or 2 of a split begins and ends; equal if it does not exist."""
    total = 0.0
    for weight in weights:
        total += weight
    bounds = [0.0]
    for weight in [*weights, 0.0, 0.0, 0.0][:3]:
        bounds.append(bounds[-1] + weight / total)
    return Fraction(str(bounds[part])), Fraction(str(bounds[part + 1]))


@dataclass(frozen=True, kw_only=True)
class BookSource:
    """What the order of one source follows from."""

    name: str
    first_row_of_page: Sequence[int]
    tokens: Sequence[int]
    window_pages: int
    method: str = "page"

    @property
    def num_pages(self) -> int:
        return len(self.first_row_of_page) - 1

    @property
    def num_windows(self) -> int:
        if self.method != "page":
            return max(1, -(-self.first_row_of_page[-1] // 16384))
        return -(-self.num_pages // self.window_pages)

    def window(self, seed: int, epoch: int, window: int) -> list[int]:
        """Section "window order": the rows of a window of an epoch."""
        if self.method != "page":
            count = self.first_row_of_page[-1]
            positions = range(window * 16384, min((window + 1) * 16384, count))
            key = named_key(seed, "row", self.name, epoch)
            return [permute(i, count, key) for i in positions] if self.method == "row" else list(positions)
        place = permute(window, self.num_windows, named_key(seed, "pages", self.name, epoch))
        key = named_key(seed, "strata", self.name, epoch)
        rows: list[int] = []
        for stratum in range(-(-self.num_pages // self.num_windows)):
            shift = mix64((stratum * PHI + key) & MASK) % self.num_windows
            page = stratum * self.num_windows + (place + shift) % self.num_windows
            if page >= self.num_pages:
                continue
            rows += range(self.first_row_of_page[page], self.first_row_of_page[page + 1])
        order = keyed_order(named_key(seed, "rows", self.name, epoch, window), len(rows))
        return [rows[i] for i in order]
