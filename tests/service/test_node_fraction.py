"""A node reads all until its processors are busy, and takes back what it has given away."""

from __future__ import annotations

import pytest

from torchmix.service.routed_reader import STEP, NodeFraction


class Clocks:
    """Time that passes when a test says so."""

    def __init__(self, cpu: int) -> None:
        self.now = self.used = 0.0
        self.fraction = NodeFraction(cpu, clock=lambda: self.now, cpu_clock=lambda: self.used)

    def after(self, seconds: float, *, used: float) -> float:
        """The fraction after some seconds, in which the process used so many processor seconds."""
        self.now, self.used = self.now + seconds, self.used + used
        return self.fraction.look()


def test_a_process_that_waits_reads_everything() -> None:
    clocks = Clocks(4)
    assert [clocks.after(2.0, used=1.0) for _ in range(5)] == [1.0] * 5


def test_busy_processors_give_away_a_step_a_second_down_to_nothing_and_take_it_back() -> None:
    clocks = Clocks(4)
    assert [clocks.after(1.0, used=3.7) for _ in range(3)] == [1 - STEP, 1 - 2 * STEP, 1 - 3 * STEP]
    assert clocks.after(1.0, used=3.2) == 1 - 3 * STEP, "between busy and free nothing moves"
    for _ in range(20):
        clocks.after(1.0, used=4.0)
    assert clocks.fraction.fraction == 0.0
    assert clocks.after(1.0, used=2.0) == STEP
    for _ in range(20):
        clocks.after(1.0, used=0.1)
    assert clocks.fraction.fraction == 1.0


def test_looks_within_a_second_are_of_one_span() -> None:
    clocks = Clocks(2)
    fractions = [clocks.after(0.3, used=0.6) for _ in range(8)]
    assert fractions == pytest.approx([1.0] * 3 + [1 - STEP] * 4 + [1 - 2 * STEP])


def test_processors_that_one_thread_cannot_fill_are_not_spent() -> None:
    assert Clocks(2).after(5.0, used=5.0) == 1.0
