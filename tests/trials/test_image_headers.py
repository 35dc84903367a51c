"""The trial of image headers, at a small count."""

from __future__ import annotations

from tests.trials.image_headers import run


def test_headers_give_the_decoded_size_and_damage_is_named() -> None:
    found = run(seed=1, count=120)
    assert found["images"] == 120 and found["refused"] > 10 and found["decoded"] > 10
