from __future__ import annotations

import numpy as np
import pytest

from torchmix.constructor import ranges
from torchmix.constructor.ranges import copy_ranges


@pytest.mark.parametrize("block", [1, 7, 1 << 18])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32, np.int64])
def test_ranges_are_copied_as_a_loop_copies_them(dtype: type, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "BLOCK", block)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = rng.integers(0, 200, 50).astype(dtype)
        cuts = np.sort(rng.integers(0, 51, 12))  # some ranges are empty
        wanted = rng.integers(0, 11, int(rng.integers(0, 30)))
        expected = [value for i in wanted for value in values[cuts[i] : cuts[i + 1]].tolist()]
        out = np.full(len(expected), -1, np.int64)
        copy_ranges(values, cuts, wanted, out=out)
        assert out.tolist() == expected, f"seed {seed}"
