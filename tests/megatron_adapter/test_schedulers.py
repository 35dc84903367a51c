"""Megatron's schedulers beside a plan: what their groups cost by a recipe's cost, and what is named where they fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.planner.test_contexts import costs_of
from torchmix.errors import OptionError
from torchmix.megatron_adapter import schedulers
from torchmix.megatron_adapter.schedulers import SCHEDULERS, installed_schedulers, judged, place_as_megatron
from torchmix.planner.contexts import place_in_contexts

TOKENS = np.array([100, 7, 30, 2, 64, 9], np.int64)


def test_groups_are_judged_by_the_cost_of_runs() -> None:
    costs = costs_of(4)
    groups = [[[0, 2], [0], [1], [1]], [[4], [5], [3], []]]
    found = judged(groups, TOKENS, costs)

    def w(sample: int, size: int) -> int:
        return int(costs.of_rank(TOKENS[[sample]], size)[0])

    assert found.load_of_ranks.tolist() == [
        [w(0, 2) + w(2, 1), w(0, 2), w(1, 2), w(1, 2)],
        [w(4, 1), w(5, 1), w(3, 1), 0],
    ]
    assert found.padded_tokens == 100 + 8 + 30 + 64 + 9 + 2
    assert found.exchanged_tokens == 2 * 50 + 2 * 4, "each of two ranks gets the other half"


def test_a_sample_that_is_missing_or_comes_twice_is_named() -> None:
    for groups in ([[[0], [1], [2], [3]]], [[[0], [1], [2], [3]], [[4], [5], [0], []]]):
        with pytest.raises(OptionError, match=r"of 6 samples, . times at most"):
            judged(groups, TOKENS, costs_of(4))


def test_classes_are_called_as_megatron_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Fake:
        def __init__(self, *given: Any) -> None:
            calls.append(given)

        def get_groups_and_subsamples(self, samples: list[tuple[int, int]], config: Any = 5) -> Any:
            calls.append(samples)
            groups = [[[each[0]], [each[0]], [each[0]], [each[0]]] for each in samples]
            return groups if config == 5 else ([], groups)

    monkeypatch.setattr(schedulers, "class_of", lambda name: Fake)
    costs = costs_of(4)
    for name in SCHEDULERS:
        assert place_as_megatron(name, TOKENS, costs).load_of_ranks.shape == (6, 4)
    assert calls[0][0] == 64 and calls[0][1].size() == 4
    assert calls[2] == calls[4] == (64, 2, 2, None), "cp 2 holds the longest"
    assert calls[1] == calls[3] == list(enumerate(TOKENS.tolist()))
    monkeypatch.setattr(Fake, "get_groups_and_subsamples", lambda *_: 1 / 0)
    with pytest.raises(OptionError, match="Megatron's dp_balanced fails: ZeroDivisionError"):
        place_as_megatron("dp_balanced", TOKENS, costs)
    monkeypatch.setattr(schedulers, "class_of", lambda name: None)
    assert installed_schedulers() == ()
    with pytest.raises(OptionError, match="the installed Megatron has no dp_balanced"):
        place_as_megatron("dp_balanced", TOKENS, costs)


@pytest.mark.slow
def test_the_installed_scheduler_of_megatron_is_no_cheaper_than_a_plan() -> None:
    pytest.importorskip("megatron.core")
    assert "BalancedCPScheduler" in installed_schedulers()
    costs = costs_of(16, rank_tokens=256)
    rng = np.random.default_rng(3)
    tokens = np.minimum(1 + rng.lognormal(4, 1.2, 120).astype(np.int64), 4000)
    found = place_as_megatron("BalancedCPScheduler", tokens, costs)
    _, report = place_in_contexts(tokens, costs)
    assert int(found.load_of_ranks.max(axis=1).sum()) >= report.cost
