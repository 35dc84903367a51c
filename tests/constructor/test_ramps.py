from __future__ import annotations

import numpy as np
import pytest

from torchmix.constructor.ramps import fill_ramps


@pytest.mark.parametrize("slope", [0, 1])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ramps_are_filled_as_a_loop_fills_them(dtype: type, slope: int) -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        start = np.unique(rng.integers(0, 40, 6))
        value = rng.integers(-5, 100, len(start)).astype(dtype)
        out = np.full(40, 12345, dtype)
        fill_ramps(start, value, slope=slope, out=out)
        expected = [
            int(first) + slope * k
            for first, tokens in zip(value, np.diff(start, append=40), strict=True)
            for k in range(tokens)
        ]
        assert out[start[0] :].tolist() == expected, f"seed {seed}"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_long_ramps_from_0_are_filled_as_a_loop_fills_them(dtype: type) -> None:
    rng = np.random.default_rng(0)
    start = np.array([5, 5, 6, *np.sort(rng.choice(np.arange(7, 40_000), 60, replace=False)).tolist()])
    out = np.full(40_000, -7, dtype)
    fill_ramps(start, np.zeros(len(start), np.int64), slope=1, out=out)
    expected = [i for a, b in zip(start.tolist(), [*start[1:].tolist(), 40_000], strict=True) for i in range(b - a)]
    assert out.tolist() == [-7] * 5 + expected


def test_no_ramp_is_no_work() -> None:
    out = np.zeros(3, np.int64)
    fill_ramps(np.zeros(0, np.int64), np.zeros(0, np.int64), slope=1, out=out)
    assert out.shape == (3,)
