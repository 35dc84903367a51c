"""The trial of damaged shards, at a small count."""

from __future__ import annotations

from tests.trials.image_shards import run


def test_damaged_shards_are_named_or_read_as_tarfile_reads_them() -> None:
    found = run(seed=1, count=30)
    assert found["refused"] > 5 and found["read"] > 2
