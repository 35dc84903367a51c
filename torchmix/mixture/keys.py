"""Keys by name and keyed hashes: every random choice of torchmix comes from here.

Equal on every machine, in every process and in every release (`docs/formats.md` freezes test vectors); no generator
object, no history. A source enters a key by its name, never by its index. Cost: one blake2b per key, a few nanoseconds
per hashed element.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

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
