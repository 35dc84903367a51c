"""A few of the trial's combinations on every run."""

from __future__ import annotations

from collections import Counter

from tests.trials.placements import try_combination


def test_random_placements_are_those_of_the_page() -> None:
    found: Counter[str] = Counter()
    for number in range(108):
        one = try_combination(5, number)
        found.update({name: value for name, value in one.items() if isinstance(value, int)})
    for what in ("items", "near", "left", "hash_order", "items_in_hash_order", "grouped", "steps"):
        assert found[what] > 0, what
