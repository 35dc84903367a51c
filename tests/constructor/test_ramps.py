from __future__ import annotations

import numpy as np
import pytest

from torchmix.constructor.arrays import fill_ramps


@pytest.mark.parametrize("slope", [0, 1])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ramps_are_filled_as_a_loop_fills_them(dtype: type, slope: int) -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        start = np.unique(rng.integers(0, 40, 6))
        value = rng.integers(0, 100, len(start)).astype(dtype)
        out = np.full(40, 12345, dtype)
        fill_ramps(start, value, slope=slope, out=out)
        expected = [
            int(first) + slope * k
            for first, tokens in zip(value, np.diff(start, append=40), strict=True)
            for k in range(tokens)
        ]
        assert out[start[0] :].tolist() == expected, f"seed {seed}"


@pytest.mark.parametrize("slope", [0, 1])
@pytest.mark.parametrize("highest", [0, 300, (1 << 16) - 1, 1 << 16, (1 << 31) - 100_000, (1 << 32) - 1, 1 << 40])
def test_ramps_over_several_blocks_and_of_any_size_are_filled_as_a_loop_fills_them(highest: int, slope: int) -> None:
    rng = np.random.default_rng(highest)
    start = np.array([5, 5, 6, *np.sort(rng.choice(np.arange(7, 100_000), 60, replace=False)).tolist()])
    value = rng.integers(0, highest + 1, len(start))
    value[7] = highest
    out = np.full(100_000, -7, np.int64)
    fill_ramps(start, value, slope=slope, out=out)
    count = np.diff(start, append=len(out))
    expected = np.concatenate([first + slope * np.arange(n) for first, n in zip(value, count, strict=True)])
    assert out.tolist() == [-7] * 5 + expected.tolist()


def test_no_ramp_is_no_work() -> None:
    out = np.zeros(3, np.int64)
    fill_ramps(np.zeros(0, np.int64), np.zeros(0, np.int64), slope=1, out=out)
    assert out.shape == (3,)
