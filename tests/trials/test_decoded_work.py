"""The trial of what is decoded, at a small count: 8 ranks as threads that decode."""

from __future__ import annotations

from tests.trials.decoded_work import try_case


def test_an_item_is_decoded_once_in_the_job() -> None:
    found = try_case(1, 0, cases=[("video", "rank", "threads")], rows=4)
    assert found["items"] > 8 and found["ratio"] > 1
