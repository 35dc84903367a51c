"""The trial of encoders of four kinds, at a small count."""

from __future__ import annotations

from tests.trials.encoder_balance import ENCODERS, table_of, try_case


def test_encoders_of_all_kinds_are_balanced_and_send_few_rows() -> None:
    found = {str(number): try_case(1, number) for number in (0, 1, 5)}
    for one in found.values():
        for kind in one["kinds"].values():
            assert 1 <= kind["over_bound"] < kind["at_home_over_bound"], one
            assert kind["items"] > 5 and kind["bytes"] < 0.5 * kind["loading_first_bytes"]
    lines = table_of(found).splitlines()
    assert len(lines) == 2 + 2 * len(ENCODERS) and all(line.count("|") == 9 for line in lines)
