"""The policy observes each step once, in order, also where Megatron computes a step twice or passes over it."""

from __future__ import annotations

import pytest
import torch

from torchmix.errors import PlanError
from torchmix.megatron_adapter.losses import StepReports

Told = list[tuple[int, dict[str, tuple[float, int]]]]


def reports() -> tuple[StepReports, Told]:
    told: Told = []
    return StepReports(["a", "b", "c"], lambda step, losses: told.append((step, dict(losses)))), told


def add(to: StepReports, step: int, index: int, count: int, losses: list[float], tokens: list[float]) -> None:
    sums = torch.tensor([losses, tokens], dtype=torch.float32)
    to.add(sums, step=step, is_first_of_step=index == 0, is_last_of_step=index + 1 == count)


def test_microbatches_of_a_step_are_summed_and_a_source_without_tokens_is_left_out() -> None:
    one, told = reports()
    add(one, 4, 0, 2, [1.5, 0, 0], [3, 0, 0])
    assert told == []
    add(one, 4, 1, 2, [2.0, 8.0, 0], [1, 4, 0])
    add(one, 5, 0, 1, [0, 1.0, 0], [0, 2, 0])
    assert told == [(4, {"a": (3.5, 4), "b": (8.0, 4)}), (5, {"b": (1.0, 2)})]


def test_a_step_that_is_computed_again_is_told_once() -> None:
    one, told = reports()
    for _ in range(2):
        add(one, 0, 0, 2, [1, 1, 1], [1, 1, 1])
        add(one, 0, 1, 2, [1, 1, 1], [1, 1, 1])
    add(one, 1, 0, 1, [1, 1, 1], [1, 1, 1])
    assert [step for step, _ in told] == [0, 1]
    assert told[0][1]["a"] == (2, 2)


def test_a_step_that_is_begun_again_counts_from_its_first_microbatch() -> None:
    one, told = reports()
    add(one, 0, 0, 2, [7, 0, 0], [7, 0, 0])  # an interrupted try
    add(one, 0, 0, 2, [1, 0, 0], [1, 0, 0])
    add(one, 0, 1, 2, [1, 0, 0], [1, 0, 0])
    assert told == [(0, {"a": (2, 2)})]


def test_a_step_that_is_passed_over_has_no_losses() -> None:
    one, told = reports()
    one.skip(0)
    add(one, 1, 0, 1, [1, 0, 0], [1, 0, 0])
    assert told == [(0, {}), (1, {"a": (1, 1)})]


def test_a_step_whose_beginning_was_not_seen_is_an_error() -> None:
    one, _ = reports()
    with pytest.raises(PlanError, match="all losses of step 3"):
        add(one, 3, 1, 2, [1, 0, 0], [1, 0, 0])
