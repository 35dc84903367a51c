"""Sizes: whole bytes, or an error."""

from __future__ import annotations

import pytest

from torchmix.errors import RecipeError
from torchmix.recipe.amounts import parse_bytes


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("64MiB", 64 * 2**20),
        ("1GiB", 2**30),
        ("512KiB", 512 * 2**10),
        ("100MB", 10**8),
        ("2TB", 2 * 10**12),
        ("1.5 GiB", 3 * 2**29),
        ("64mib", 64 * 2**20),
        ("17", 17),
        ("17B", 17),
        (123456, 123456),
    ],
)
def test_sizes_parse_to_bytes(size: str | int, num_bytes: int) -> None:
    assert parse_bytes(size, where="read.cache") == num_bytes


@pytest.mark.parametrize("size", ["", "0", "MiB", "1.5B", "-1", "1e3", "1 PiB", "9" * 40, "99999999TiB", "\u0661GiB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_bytes(size, where="read.cache")
    assert caught.value.where == "read.cache"
