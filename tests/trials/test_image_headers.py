"""The trial of image headers, at a small count."""

from __future__ import annotations

from tests.trials.image_headers import run


def test_headers_give_the_decoded_size_and_damage_is_named() -> None:
    found = run(seed=1, count=250)
    assert found["images"] == 250 and found["refused"] > 20 and found["decoded"] > 20
