from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from torchmix.mixture.keys import named_key, permute, unpermute


def whole(n: int, key: int) -> np.ndarray:
    return permute(np.arange(n, dtype=np.int64), n, key)


def chi_square(counts: np.ndarray) -> float:
    """Standard deviations by which counts of equally likely cells are more uneven than chance."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_it_is_a_bijection_of_every_small_domain():
    for n in range(1, 301):
        assert np.array_equal(np.sort(whole(n, named_key(5, n))), np.arange(n)), n


@pytest.mark.parametrize("bits", range(9, 17))
def test_it_is_a_bijection_at_and_beside_powers_of_two(bits):
    for n in (2**bits - 1, 2**bits, 2**bits + 1):
        assert np.array_equal(np.sort(whole(n, named_key(6, n))), np.arange(n)), n


@pytest.mark.parametrize("n", [2**31 - 1, 2**32 + 1, 10**12 + 39, 2**61 - 1, 2**61 + 1, 2**62])
def test_it_stays_inside_a_huge_domain_and_never_meets_itself(n):
    rng = np.random.default_rng(n % 1000)
    positions = np.unique(np.concatenate([rng.integers(0, n, 20_000), np.arange(2000), n - 1 - np.arange(2000)]))
    images = permute(positions, n, named_key(7, n))
    assert images.dtype == np.int64
    assert images.min() >= 0 and images.max() < n
    assert len(np.unique(images)) == len(positions)
    # A domain's images reach all of it: 24,000 of them leave no tenth empty.
    assert np.histogram(images.astype(float), bins=10, range=(0, float(n)))[0].min() > 1500


def test_a_position_asked_alone_or_in_any_company_lands_at_the_same_place():
    rng = np.random.default_rng(8)
    for n in (1, 2, 63, 64, 65, 1000, 10**9):
        positions = rng.integers(0, n, 200)
        together = permute(positions, n, 99)
        alone = [int(permute(np.array([position]), n, 99)[0]) for position in positions.tolist()]
        assert together.tolist() == alone
        assert permute(positions[::-1].copy(), n, 99)[::-1].tolist() == alone


def test_every_image_leads_back_to_its_position():
    rng = np.random.default_rng(9)
    for n in (1, 2, 3, 17, 63, 64, 65, 1000, 2**20 + 1, 10**12 + 39, 2**62):
        positions = rng.integers(0, n, 500)
        assert np.array_equal(unpermute(permute(positions, n, 77), n, 77), positions)
        assert np.array_equal(permute(unpermute(positions, n, 77), n, 77), positions)


def test_asking_leaves_the_positions_alone_and_none_gives_none():
    positions = np.arange(100, dtype=np.int64)
    permute(positions, 100, 3)
    assert np.array_equal(positions, np.arange(100))
    assert permute(positions[:0], 100, 3).tolist() == []


def test_permutations_are_the_ones_of_the_first_release():
    assert whole(10, 0).tolist() == [3, 8, 6, 7, 1, 5, 0, 9, 4, 2]
    assert whole(64, 1234)[:10].tolist() == [3, 28, 36, 4, 16, 26, 29, 21, 34, 22]
    assert whole(100, (1 << 64) - 1)[:10].tolist() == [20, 52, 4, 29, 70, 64, 58, 69, 41, 3]
    assert permute(np.array([0, 1, 10**12]), 10**12 + 39, 42).tolist() == [972077612243, 132638442884, 737445196096]
    assert permute(np.array([0, 1, 2**62 - 1]), 2**62, 42).tolist() == [
        4246434891928514877,
        1112354533431338233,
        2373688640864148813,
    ]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_tiny_domain_is_about_equally_likely(n):
    orders = {order: i for i, order in enumerate(itertools.permutations(range(n)))}
    counts = np.zeros(len(orders))
    for trial in range(500):
        counts[orders[tuple(whole(n, named_key(9, n, trial)).tolist())]] += 1
    assert chi_square(counts) < 4, counts


@pytest.mark.parametrize("n", [7, 17, 63, 64, 100])
def test_every_position_lands_everywhere_about_equally_often(n):
    keys = 600
    images = np.stack([whole(n, named_key(10, n, trial)) for trial in range(keys)])
    for position in (0, 1, n // 2, n - 1):
        assert chi_square(np.bincount(images[:, position], minlength=n)) < 5, position
    # Where a neighbour lands, seen from where one landed: any of the n - 1 other places.
    for lag in (1, 2, n // 2):
        between = (images[:, lag] - images[:, 0]) % n
        assert between.min() > 0
        assert chi_square(np.bincount(between, minlength=n)[1:]) < 5, lag


@pytest.mark.parametrize("n", [4096, 2**16 + 1, 2**17, 2**20, 1_000_003])
def test_neighbours_share_no_parity_and_no_other_remainder(n):
    count = min(n, 1 << 18)
    for trial in range(2):
        images = permute(np.arange(count, dtype=np.int64), n, named_key(11, n, trial))
        for lag in (1, 2, 3, 64, 1024, 2048):
            ahead, behind = images[lag:], images[:-lag]
            for modulus in (2, 3, 8, 10):
                pairs = ahead % modulus * modulus + behind % modulus
                # Drawn without repeats, and n need not divide: both shift counts by far less than this bound.
                assert chi_square(np.bincount(pairs, minlength=modulus * modulus)) < 6, (n, lag, modulus)


@pytest.mark.parametrize("n", [4096, 2**16 + 1, 2**17, 2**20, 1_000_003, 2**61 + 1])
def test_places_of_neighbours_are_uncorrelated_in_high_and_low_bits(n):
    count = min(n, 1 << 17)
    images = permute(np.arange(count, dtype=np.int64), n, named_key(12, n))
    for values in (images / n, images % 4096 / 4096, images % 3 / 3):
        centred = values - values.mean()
        for lag in (1, 2, 5, 32, 256, 1024):
            correlation = float((centred[lag:] * centred[:-lag]).mean() / (centred * centred).mean())
            assert abs(correlation) < 5 / math.sqrt(count - lag), (n, lag, correlation)


def test_neighbours_of_one_key_are_strangers_under_another():
    n = 50_000
    one, other = whole(n, named_key(13, 0)), whole(n, named_key(13, 1))
    assert np.count_nonzero(one == other) < 12  # one is expected
    correlation = float(np.corrcoef(one, other)[0, 1])
    assert abs(correlation) < 5 / math.sqrt(n)
