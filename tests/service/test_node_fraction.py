"""A node reads all until its processors or its memory are used, and takes back what it has given away."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torchmix.service.routed_reader import NUM_PARTS, STEP, NodeFraction, NodeRoom


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


def test_memory_holds_the_largest_part_of_the_pages_that_fits() -> None:
    chance, rng = random.Random(7), np.random.default_rng(7)
    for _ in range(30):
        streams = {
            stream: (rng.integers(0, 2**64, size, np.uint64), rng.integers(0, 1000, size))
            for stream, size in enumerate(rng.integers(0, 300, chance.randint(1, 5)).tolist())
        }
        for of_stream in ({}, {0: streams[0]}):  # a stream's windows come in the place of those before
            room = NodeRoom(chance.choice([0, 10_000, 100_000, 10**9]))
            for stream, (runs, sizes) in [*of_stream.items(), *streams.items()]:
                room.expect(stream, runs if stream else runs[::2], sizes if stream else sizes[::2])
            for stream, (runs, sizes) in streams.items():
                room.expect(stream, runs, sizes)
        runs, sizes = (np.concatenate([one[k] for one in streams.values()]) for k in (0, 1))
        part_of_run = (runs >> np.uint64(54)).astype(np.int64)
        held = int(sizes[part_of_run < room.part * NUM_PARTS].sum())
        assert (room.needed_bytes, room.held_bytes) == (sizes.sum(), held) and held <= room.room_bytes
        if room.part < 1:
            more = room.part * NUM_PARTS * 16 / 15 + 1
            assert sizes[part_of_run <= more].sum() > room.room_bytes, "hardly more fits"


def test_windows_that_differ_a_little_move_no_page() -> None:
    rng = np.random.default_rng(3)
    runs, room = rng.integers(0, 2**64, 10_000, np.uint64), NodeRoom(50_000)
    parts = list[float]()
    for size in (9_900, *rng.integers(9_800, 10_001, 20).tolist()):
        room.expect(0, runs[:size], np.full(size, 10))
        parts.append(room.part)
    assert len(set(parts)) == 1 and 0.45 < parts[0] < 0.5
    room.expect(0, runs[:5000], np.full(5000, 10))
    assert room.part == 1.0
