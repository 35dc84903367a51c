"""Keys by name, keyed hashes and bijections: every random choice of torchmix comes from here.

Equal on every machine, in every process and in every release (`docs/formats.md` freezes test vectors); no generator
object, no history. A source enters a key by its name, never by its index. Cost: one blake2b per key, a few nanoseconds
per hashed element.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

U64 = NDArray[np.uint64]
PHI64 = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, odd: steps of a Weyl sequence that visits all 64-bit values."""
_MASK = (1 << 64) - 1
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def named_key(seed: int, *path: str | int) -> int:
    """64-bit key of a place in the order, for example `named_key(seed, "pages", source_name, epoch)`.

    Args:
        seed: The recipe's seed, in [0, 2^63).
        path: Names and integers in [-2^63, 2^63); their types and lengths are part of the key.

    Returns:
        int in [0, 2^64): the first 8 bytes, little endian, of blake2b over the tagged path.
    """
    digest = hashlib.blake2b(struct.pack("<q", seed), digest_size=8, person=b"torchmix-key-1")
    for part in path:
        if isinstance(part, str):
            text = part.encode()
            digest.update(b"s" + struct.pack("<q", len(text)) + text)
        else:
            digest.update(b"i" + struct.pack("<q", part))
    return int.from_bytes(digest.digest(), "little")


def mix64(values: U64) -> U64:
    """Hash each element; a bijection of 64 bits in which every output bit depends on every input bit.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014; variant 13 of Stafford).
    """
    mixed: U64 = values >> _SHIFTS[0]
    mixed ^= values
    mixed *= _FACTORS[0]
    scratch = mixed >> _SHIFTS[1]
    mixed ^= scratch
    mixed *= _FACTORS[1]
    mixed ^= np.right_shift(mixed, _SHIFTS[2], out=scratch)
    return mixed


def hash_columns(key: int, *columns: NDArray[np.int64] | U64) -> U64:
    """[n] hash of each row of equally long columns, under a key."""
    state: U64 = np.full(len(columns[0]), key & _MASK, np.uint64)
    for column in columns:
        state = mix64(state * np.uint64(PHI64) + column.astype(np.uint64))
    return state


def keyed_order(key: int, count: int) -> NDArray[np.int64]:
    """A random order of [0, count): positions sorted by their keyed hash.

    The hash keeps its high bits, the position fills the low ones: keys are unique, so a plain sort is
    deterministic and no argsort is needed.
    """
    positions = np.arange(count, dtype=np.uint64)
    return order_by(np.zeros(count, np.uint64), mix64(positions * np.uint64(PHI64) + np.uint64(key)), major_bits=0)


def keyed_order_at(key: int, positions: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The order that `keyed_order(key, count)` gives to some of the positions, at the cost of these alone.

    Args:
        key: As there.
        positions: [k] ascending, in [0, count).
        count: All positions.

    Returns:
        int64 [k] indices into `positions`.
    """
    index_bits = max(1, (count - 1).bit_length())
    places = positions.astype(np.uint64)
    keys = mix64(places * np.uint64(PHI64) + np.uint64(key)) >> np.uint64(index_bits) << np.uint64(index_bits)
    keys |= places
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    order: NDArray[np.int64] = positions.searchsorted(keys.astype(np.int64))
    return order


def order_by(major: U64, tie: U64, *, major_bits: int) -> NDArray[np.int64]:
    """Order of n items by `major`, then by the hash `tie`, then by position.

    Args:
        major: [n] values in [0, 2^major_bits).
        tie: [n] hashes; as many of their high bits as fit decide between equal `major`.
        major_bits: At most 64 less the bits of n.

    Returns:
        int64 [n] positions in sorted order.
    """
    count = len(major)
    index_bits = max(1, (count - 1).bit_length())
    assert major_bits + index_bits <= 64, (major_bits, count)
    keys = np.arange(count, dtype=np.uint64)
    hash_bits = 64 - major_bits - index_bits
    if hash_bits:
        keys |= (tie >> np.uint64(64 - hash_bits)) << np.uint64(index_bits)
    if major_bits:
        keys |= major << np.uint64(64 - major_bits)
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    return keys.astype(np.int64)


# --- A bijection of [0, n): keyed, stateless, vectorised, 64-bit.
#
# A bijection for every n >= 1; any position can be asked alone, so an epoch's order is never stored. Cost: about 35 ns
# per position at 6 rounds, and some 50 microseconds a call, which is nearly the whole cost in a small domain.

_PHI64 = np.uint64(PHI64)
ROUNDS = 6
SMALL = 64
"""Below this many elements the halves are 3 bits or fewer, and mix slowly: `ROUNDS_SMALL` then."""
ROUNDS_SMALL = 10
TABLE = 1 << 14
"""Largest network that is computed once as a table."""


def permute(positions: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Image of each position under the permutation of [0, n) that `key` names.

    A balanced Feistel network over the smallest even number of bits that holds n, walked along its
    cycle until the value is below n (at most 4 expected steps). A round takes the *high* bits of a
    full 64-bit hash: low bits of a weak round never mix, and any later `% k` would show it.

    Args:
        positions: int64 [k] in [0, n).
        n: Size of the domain, in [1, 2^62].
        key: 64-bit key.

    Returns:
        int64 [k] in [0, n), distinct for distinct positions.

    Source: Luby & Rackoff 1988; cycle walking: Black & Rogaway 2002.
    """
    return _walk(positions, n, key, _feistel)


def unpermute(images: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Position that each image came from: the inverse of `permute`.

    Args:
        images: int64 [k] in [0, n).
        n, key: As for `permute`.

    Returns:
        int64 [k] in [0, n).
    """
    return _walk(images, n, key, _feistel_back)


def _shape(n: int) -> tuple[int, int]:
    """Bits of a half of a domain's network, and its number of rounds."""
    return max(1, ((n - 1).bit_length() + 1) // 2), ROUNDS_SMALL if n < SMALL else ROUNDS


def _walk(
    values: NDArray[np.int64], n: int, key: int, network: Callable[[NDArray[np.int64], _Rounds], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Apply a network until every value is below n. Backwards, it walks the same cycle in the other direction."""
    if n == 1:
        return np.zeros_like(values)
    rounds = _Rounds(n, key, len(values))
    size = 1 << 2 * rounds.half_bits
    if size <= min(TABLE, 16 * len(values)):
        # For small arrays a call costs more than its work: one pass makes a table of the network, and walks index it.
        table = network(np.arange(size), rounds)
        images: NDArray[np.int64] = table[values]
        while (outside := np.flatnonzero(images >= n)).size:
            images[outside] = table[images[outside]]
        return images
    walked = network(values, rounds)
    outside = np.flatnonzero(walked >= n)
    while outside.size:
        walked[outside] = network(walked[outside], rounds)
        outside = outside[walked[outside] >= n]
    return walked


class _Rounds:
    """The rounds of a network over the smallest even number of bits that holds n."""

    def __init__(self, n: int, key: int, num_values: int) -> None:
        """`num_values`: about how many values will go through it."""
        self.half_bits, self.count = _shape(n)
        self._drop = np.uint64(64 - self.half_bits)
        self._key = mix64(np.arange(1, self.count + 1, dtype=np.uint64) * _PHI64 + np.uint64(key & _MASK))
        self._hashes: NDArray[np.int64] | None = None
        if 1 << self.half_bits <= min(TABLE, 4 * num_values):
            # A half has few values: one pass hashes the values of all rounds into a table.
            halves = np.arange(1 << self.half_bits, dtype=np.uint64) * _PHI64
            self._hashes = self._of_hash(mix64(halves + self._key[:, None]))

    def hash(self, number: int, half: NDArray[np.int64]) -> NDArray[np.int64]:
        """What a round adds to one half, from the other."""
        if self._hashes is not None:
            found: NDArray[np.int64] = self._hashes[number][half]
            return found
        return self._of_hash(mix64(half.astype(np.uint64) * _PHI64 + self._key[number]))

    def _of_hash(self, mixed: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The high bits of each hash, as many as a half has; overwrites the array."""
        mixed >>= self._drop
        return mixed.view(np.int64)


def _feistel(values: NDArray[np.int64], rounds: _Rounds) -> NDArray[np.int64]:
    left, right = values >> rounds.half_bits, values & ((1 << rounds.half_bits) - 1)
    for number in range(rounds.count):
        left, right = right, left ^ rounds.hash(number, right)
    return (left << rounds.half_bits) | right


def _feistel_back(values: NDArray[np.int64], rounds: _Rounds) -> NDArray[np.int64]:
    left, right = values >> rounds.half_bits, values & ((1 << rounds.half_bits) - 1)
    for number in reversed(range(rounds.count)):
        left, right = right ^ rounds.hash(number, left), left
    return (left << rounds.half_bits) | right


# --- Which pages of a source are in which window of an epoch: one of each stratum, drawn by a keyed hash.
#
# Every page lies in one window; any window can be asked alone. Cost: a few nanoseconds a page of the window.
#
# A stratum is a run of neighbouring pages, as many as there are windows; each window takes a random page of each
# stratum. So every window samples all parts of the files evenly, and holds the same mixture as the whole source. Pages
# drawn at random from everywhere would make one window differ from the next. The sizes of all windows differ by at
# most a page.
#
# Source: stratified sampling, Neyman 1934; which page of a stratum is a random shift, as in systematic sampling.


def pages_at(place: int, *, num_pages: int, num_windows: int, key: int) -> Int64Array:
    """Pages of a window, ascending.

    Args:
        place: In [0, num_windows); windows of neighbouring places have neighbouring pages.
        num_pages: P, 1 or more.
        num_windows: Windows of the epoch, in [1, P].
        key: 64-bit key of the choice in each stratum.

    Returns:
        int64, floor or ceil of P / num_windows of them.
    """
    strata = np.arange(-(-num_pages // num_windows))
    if num_windows == 1:
        return strata
    pages = strata * num_windows + (place + _shifts(strata, num_windows, key)) % num_windows
    return pages if pages[-1] < num_pages else pages[:-1]


def places_of(pages: Int64Array, *, num_windows: int, key: int) -> Int64Array:
    """The place of the window of each page, [n]: the inverse of `pages_at`."""
    places: Int64Array = (pages - _shifts(pages // num_windows, num_windows, key)) % num_windows
    return places


def _shifts(strata: Int64Array, num_windows: int, key: int) -> Int64Array:
    """[n] in [0, num_windows), by hash."""
    hashes = mix64(strata.astype(np.uint64) * np.uint64(PHI64) + np.uint64(key))
    shifts: Int64Array = (hashes % np.uint64(num_windows)).view(np.int64)
    return shifts
