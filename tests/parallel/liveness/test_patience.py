"""The store of a job is asked no more often however many ranks there are, and a lost host is still named soon."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchmix.parallel.liveness.evidence import (
    MOST_REQUESTS_S,
    REQUESTS_A_BEAT,
    REQUESTS_A_FAST_LOOK,
    REQUESTS_A_LOOK,
    Pace,
    Patience,
    is_large,
    pace_at_size,
)

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from liveness_scale import simulate

POLL_S = Patience().poll_s


@pytest.mark.parametrize("ranks_of_host", [1, 2, 8, 72])
@pytest.mark.parametrize("world_size", [2, 243, 244, 320, 1000, 4096, 20_000, 200_000])
def test_the_store_is_asked_no_more_often_however_many_ranks_there_are(world_size: int, ranks_of_host: int) -> None:
    pace = pace_at_size(POLL_S, world_size=world_size, ranks_of_host=ranks_of_host)
    assert POLL_S <= pace.fast_s <= pace.slow_s
    assert is_large(POLL_S, world_size=world_size) == (world_size > 243)
    look = REQUESTS_A_FAST_LOOK if world_size > 243 else REQUESTS_A_LOOK
    others = ranks_of_host - 1
    asked = (REQUESTS_A_BEAT + look) / pace.fast_s + others * (REQUESTS_A_BEAT + REQUESTS_A_LOOK) / pace.slow_s
    assert asked * world_size / ranks_of_host <= MOST_REQUESTS_S * (1 + 1e-9)


def test_a_small_job_keeps_its_pace() -> None:
    assert pace_at_size(POLL_S, world_size=243, ranks_of_host=8) == Pace(fast_s=POLL_S, slow_s=POLL_S)


def test_beats_between_hosts_slow_down_last() -> None:
    paces = [pace_at_size(POLL_S, world_size=1 << power, ranks_of_host=8) for power in range(8, 14)]
    assert [pace.fast_s for pace in paces[:3]] == [POLL_S] * 3
    assert paces == sorted(paces, key=lambda pace: (pace.fast_s, pace.slow_s))


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_host", [1, 8])
def test_simulated_ranks_ask_as_often_as_is_said_and_name_a_death(ranks_per_host: int) -> None:
    found = simulate(320, ranks_per_host, [161], quiet_s=30.0)
    assert found["requests_per_s"] <= 2000
    lost_host = simulate(320, ranks_per_host, [*range(160, 160 + ranks_per_host)], quiet_s=30.0)
    for death in (found, lost_host):
        assert death["all_know_s"] <= Patience().remote_s + 4 * death["fast_s"] + 1, "by the clock of the simulation"
    if ranks_per_host > 1:
        assert found["named_s"] <= 2.0, "two looks at the host"
        assert found["all_know_s"] <= found["named_s"] + found["fast_s"] + 1
