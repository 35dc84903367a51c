"""A bijection of [0, n): keyed, stateless, vectorised, 64-bit.

In: positions, n and a key. Out: where each position lands, or came from. Must hold: a bijection for every n >= 1; any
position can be asked alone, so an epoch's page order is never stored. Cost: about 35 ns per position at 6 rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torchmix.mixture.keys import PHI64, mix64

_MASK = (1 << 64) - 1
_Network = Callable[[NDArray[np.uint64], int, NDArray[np.uint64]], NDArray[np.uint64]]
ROUNDS = 6
SMALL = 64
"""Below this many elements the halves are 3 bits or fewer, and mix slowly: `ROUNDS_SMALL` then."""
ROUNDS_SMALL = 10
TABLE = 1 << 14
"""Largest network that is made a table."""


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


def _walk(values: NDArray[np.int64], n: int, key: int, network: _Network) -> NDArray[np.int64]:
    """Apply a network until every value is below n; backwards this takes the same cycle the other way round."""
    if n == 1:
        return np.zeros_like(values)
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    rounds = ROUNDS_SMALL if n < SMALL else ROUNDS
    round_keys = mix64(np.array([(key + PHI64 * (r + 1)) & _MASK for r in range(rounds)], np.uint64))
    size = 1 << 2 * half_bits
    if size <= min(TABLE, 16 * len(values)):
        # Of small arrays a call costs more than the work: one pass makes the network a table, and walks look it up.
        table = network(np.arange(size, dtype=np.uint64), half_bits, round_keys).astype(np.int64)
        images: NDArray[np.int64] = table[values]
        while (outside := np.flatnonzero(images >= n)).size:
            images[outside] = table[images[outside]]
        return images
    walked = network(values.astype(np.uint64), half_bits, round_keys)
    outside = np.flatnonzero(walked >= np.uint64(n))
    while outside.size:
        walked[outside] = network(walked[outside], half_bits, round_keys)
        outside = outside[walked[outside] >= np.uint64(n)]
    return walked.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    half, low, drop = np.uint64(half_bits), np.uint64((1 << half_bits) - 1), np.uint64(64 - half_bits)
    left, right = values >> half, values & low
    for round_key in round_keys:
        left, right = right, left ^ (mix64(right * np.uint64(PHI64) + round_key) >> drop)
    joined: NDArray[np.uint64] = (left << half) | right
    return joined


def _feistel_back(values: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    half, low, drop = np.uint64(half_bits), np.uint64((1 << half_bits) - 1), np.uint64(64 - half_bits)
    left, right = values >> half, values & low
    for round_key in round_keys[::-1]:
        left, right = right ^ (mix64(left * np.uint64(PHI64) + round_key) >> drop), left
    joined: NDArray[np.uint64] = (left << half) | right
    return joined
