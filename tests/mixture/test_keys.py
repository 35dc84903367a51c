from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from torchmix.mixture.keys import PHI64, hash_columns, keyed_order, mix64, named_key, order_by

MASK = (1 << 64) - 1
# mix64 of k x PHI64, k = 1, 2, ..: the published first outputs of SplitMix64 from state 0.
SPLITMIX64_FROM_0 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)


def slow_mix64(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def slow_unshift(value: int, shift: int) -> int:
    plain = value
    for _ in range(64 // shift):
        plain = value ^ (plain >> shift)
    return plain


def slow_unmix64(value: int) -> int:
    value = slow_unshift(value, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    value = slow_unshift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return slow_unshift(value, 30)


def random_u64(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64)


@pytest.mark.parametrize(
    ("seed", "path", "key"),
    [
        (0, (), 0x728AD658D74FE9B9),
        (1234, ("pages", "web", 0), 0xA37C84B761A93DBD),
        (1234, ("pages", "web", 1), 0xC623C7861A610D51),
        (1234, ("rows", "web", 0, 3), 0xE36658D631D11DE1),
        (2**63 - 1, ("Übersetzung", -1), 0xDF783BFDD2F298C1),
        (7, ("", 2**63 - 1, -(2**63)), 0xAB02A51283ED10D3),
    ],
)
def test_keys_are_the_ones_of_the_first_release(seed, path, key):
    assert named_key(seed, *path) == key


def test_a_key_hashes_the_tagged_path():
    tagged = b"s" + struct.pack("<q", 3) + b"web" + b"i" + struct.pack("<q", 5)
    expected = hashlib.blake2b(struct.pack("<q", 9) + tagged, digest_size=8, person=b"torchmix-key-1").digest()
    assert named_key(9, "web", 5) == int.from_bytes(expected, "little")


def test_paths_that_read_alike_when_joined_have_different_keys():
    paths: list[tuple[str | int, ...]] = [
        (),
        ("",),
        ("", ""),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("a", "b", "c"),
        ("1",),
        (1,),
        (-1,),
        (1, 0),
        (0, 1),
        (0,),
        (256,),
        ("\0",),
        ("a\0",),
        ("a",),
        ("ä",),
        ("a\u0308",),  # looks like the one before, and is another name
        ("s" + "\1" + "\0" * 7 + "a",),  # holds the tag of a part itself
    ]
    keys = {named_key(seed, *path) for seed in (0, 1, 256) for path in paths}
    assert len(keys) == 3 * len(paths)


def test_a_number_beyond_64_bits_has_no_key_rather_than_a_cut_one():
    for path in ((2**63,), (-(2**63) - 1,)):
        with pytest.raises(struct.error):
            named_key(0, *path)
    with pytest.raises(struct.error):
        named_key(2**63)


def test_mix64_gives_the_published_outputs_of_splitmix64():
    states = np.arange(1, 5, dtype=np.uint64) * np.uint64(PHI64)
    assert mix64(states).tolist() == list(SPLITMIX64_FROM_0)


def test_mix64_equals_plain_integers_and_can_be_undone():
    values = np.concatenate([random_u64(1, 500), np.array([0, 1, 2**63, MASK], np.uint64)])
    before = values.copy()
    mixed = mix64(values)
    assert np.array_equal(values, before), "the argument was written to"
    assert mixed.dtype == np.uint64
    assert mixed.tolist() == [slow_mix64(value) for value in before.tolist()]
    assert [slow_unmix64(value) for value in mixed.tolist()] == before.tolist()


def test_every_bit_of_mix64_depends_on_every_bit_about_evenly():
    values = random_u64(2, 4000)
    mixed = mix64(values)
    for bit in range(64):
        flipped = mix64(values ^ np.uint64(1 << bit)) ^ mixed
        share = (flipped[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(axis=0)
        # 4000 throws have a standard deviation of 0.008; 4096 pairs of bits are looked at.
        assert share.min() > 0.45 and share.max() < 0.55, (bit, share.min(), share.max())


def test_hash_columns_equals_plain_integers():
    rng = np.random.default_rng(3)
    columns = [rng.integers(-(2**63), 2**63, 50), rng.integers(0, 9, 50), random_u64(4, 50)]
    for key in (0, 5, MASK):
        expected = []
        for row in zip(*(column.tolist() for column in columns), strict=True):
            state = key
            for value in row:
                state = slow_mix64((state * PHI64 + value) & MASK)
            expected.append(state)
        assert hash_columns(key, *columns).tolist() == expected


def test_hashes_of_columns_are_the_ones_of_the_first_release():
    sources, rows = np.array([3, 3, 4], np.int64), np.array([0, 1, 0], np.int64)
    assert hash_columns(42, sources, rows).tolist() == [0xD10CBF1099E4C464, 0xEC732C7056EA7FF6, 0xB73E454D874B3AFA]


def test_hash_columns_tells_keys_columns_and_neighbours_apart():
    a, b = (grid.ravel() for grid in np.meshgrid(np.arange(200), np.arange(200)))
    hashes = np.concatenate(
        [hash_columns(1, a, b), hash_columns(2, a, b), hash_columns(1, a), hash_columns(1, a, b, b)]
    )
    # 3 x 40,000 pairs and 200 single values, each value of `a` alone 200 times.
    assert len(np.unique(hashes)) == 3 * 40_000 + 200


@pytest.mark.parametrize("count", [*range(20), 31, 32, 33, 127, 128, 129, 1000])
def test_keyed_order_sorts_positions_by_the_high_bits_of_their_hash(count):
    key = named_key(1, "test", count)
    index_bits = max(1, (count - 1).bit_length())
    hashes = [slow_mix64((position * PHI64 + key) & MASK) >> index_bits for position in range(count)]
    order = keyed_order(key, count)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(count), key=lambda position: (hashes[position], position))


def test_keyed_orders_are_the_ones_of_the_first_release():
    assert keyed_order(1234, 12).tolist() == [0, 11, 3, 8, 4, 9, 7, 2, 6, 5, 1, 10]
    assert keyed_order(MASK, 5).tolist() == [3, 4, 0, 1, 2]


def lexsorted(major: np.ndarray, tie: np.ndarray, major_bits: int) -> list[int]:
    """By `major`, then the bits of `tie` that are left, then position."""
    hash_bits = 64 - major_bits - max(1, (len(tie) - 1).bit_length())
    seen = [value >> (64 - hash_bits) if hash_bits else 0 for value in tie.tolist()]
    return sorted(range(len(tie)), key=lambda item: (int(major[item]), seen[item], item))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 63, 64, 65, 700])
def test_order_by_equals_a_sort_by_major_then_hash_then_position(count):
    rng = np.random.default_rng(count)
    index_bits = max(1, (count - 1).bit_length())
    for major_bits in (0, 1, 2, 17, 40, 63 - index_bits, 64 - index_bits):
        for most_major in {min(1 << major_bits, 3), 1 << major_bits}:
            major = rng.integers(0, most_major, count, dtype=np.uint64)
            for tie in (random_u64(count, count), np.zeros(count, np.uint64), np.full(count, MASK, np.uint64)):
                order = order_by(major, tie, major_bits=major_bits)
                assert order.tolist() == lexsorted(major, tie, major_bits), (count, major_bits)


def test_order_by_leaves_its_arguments_alone_and_keeps_the_largest_major_last():
    major, tie = np.array([2**33 - 1, 0, 2**33 - 1], np.uint64), np.array([5, MASK, 4], np.uint64) << np.uint64(50)
    kept = major.copy(), tie.copy()
    assert order_by(major, tie, major_bits=33).tolist() == [1, 2, 0]
    assert np.array_equal(major, kept[0]) and np.array_equal(tie, kept[1])


def test_order_by_refuses_majors_that_leave_no_room_for_positions():
    with pytest.raises(AssertionError):
        order_by(np.zeros(5, np.uint64), np.zeros(5, np.uint64), major_bits=62)
