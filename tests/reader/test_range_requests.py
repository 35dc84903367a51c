from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from tests.support.deadlines import LONG_S
from torchmix.errors import SourceUnreadable
from torchmix.reader import open_files as range_requests
from torchmix.reader.open_files import RangeFetch, RequestPool, Wanted, plan_requests

FILE_BYTES = 200_000


class FakeObjects:
    """Objects in memory, as `OpenObjects` reads them."""

    def __init__(self, num_files: int = 3) -> None:
        self.contents = [random.Random(i).randbytes(FILE_BYTES) for i in range(num_files)]
        self.asked: list[tuple[int, int, int]] = []
        self.bad: set[int] = set()
        self.gate: threading.Event | None = None

    def read(self, file: int, offset: int, num_bytes: int) -> bytes:
        self.asked.append((file, offset, num_bytes))
        if self.gate is not None:
            assert self.gate.wait(LONG_S)
        if any(offset <= byte < offset + num_bytes for byte in self.bad):
            raise SourceUnreadable(f"fails at {offset}")
        return self.contents[file][offset : offset + num_bytes]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_requests, "GAP_BYTES", 100)
    monkeypatch.setattr(range_requests, "MOST_REQUEST_BYTES", 5000)
    monkeypatch.setattr(range_requests, "HELD_BYTES", 12_000)


@pytest.fixture
def pool():
    pool = RequestPool()
    yield pool
    pool.close()


def wanted_of(objects: Any, *ranges: tuple[int, int, int]) -> list[Wanted]:
    return [Wanted(objects, *one) for one in ranges]


def random_wanted(objects: Any, rng: random.Random, *, in_order: bool) -> list[Wanted]:
    ranges, offset, file = [], 0, 0
    for _ in range(rng.randrange(1, 60)):
        offset += rng.choice((0, 0, 3, 99, 100, 101, 5000))
        num_bytes = rng.choice((0, 1, 50, 700, 4999, 13_000))
        if offset + num_bytes > FILE_BYTES or rng.random() < 0.05:
            file, offset = rng.randrange(3), 0
        ranges.append((file, offset, num_bytes))
        offset += num_bytes
    if not in_order:
        rng.shuffle(ranges)
    return wanted_of(objects, *ranges)


def test_neighbours_are_one_request_and_others_are_not() -> None:
    wanted = wanted_of("o", (0, 1000, 10), (0, 1010, 10), (0, 1120, 10), (0, 1231, 10), (1, 1241, 10))
    assert [(one.file, one.start, one.stop, one.num_uses) for one in plan_requests(wanted)] == [
        (0, 1000, 1130, 3),
        (0, 1231, 1241, 1),
        (1, 1241, 1251, 1),
    ]


@pytest.mark.parametrize("in_order", [True, False])
def test_requests_are_bounded_cover_all_and_fetch_little_else(in_order: bool) -> None:
    rng = random.Random(4)
    for _ in range(30):
        wanted = random_wanted("o", rng, in_order=in_order)
        requests = plan_requests(wanted)
        assert all(0 < one.stop - one.start <= 5000 for one in requests)
        needed, fetched = np.zeros((2, 3, FILE_BYTES), np.int64)
        for one in wanted:
            needed[one.file, one.offset : one.offset + one.num_bytes] = 1
        for request in requests:
            fetched[request.file, request.start : request.stop] += 1
        assert fetched.max() <= 1 and (fetched >= needed).all()
        assert fetched.sum() <= needed.sum() + 100 * len(wanted)


@pytest.mark.parametrize("in_order", [True, False])
def test_ranges_come_as_they_are_in_the_files(pool, in_order: bool) -> None:
    rng = random.Random(5)
    for _ in range(30):
        objects = FakeObjects()
        wanted = random_wanted(objects, rng, in_order=in_order)
        with RangeFetch(pool, wanted) as fetch:
            for _, file, offset, num_bytes in wanted:
                taken = fetch.take(objects, file, offset, num_bytes)  # type: ignore[arg-type]
                assert taken == objects.contents[file][offset : offset + num_bytes]
        assert pool.held_bytes == 0
        assert sorted(objects.asked) == sorted((r.file, r.start, r.stop - r.start) for r in plan_requests(wanted))


def test_a_range_that_was_not_named_or_was_taken_is_not_there(pool) -> None:
    objects = FakeObjects()
    with RangeFetch(pool, wanted_of(objects, (0, 100, 50), (0, 9000, 50))) as fetch:
        assert fetch.take(objects, 0, 90, 20) is None  # type: ignore[arg-type]
        assert fetch.take(objects, 0, 140, 9000) is None  # type: ignore[arg-type]
        assert fetch.take(objects, 1, 100, 50) is None  # type: ignore[arg-type]
        assert fetch.take(objects, 0, 100, 50) is not None  # type: ignore[arg-type]
        assert fetch.take(objects, 0, 100, 50) is None  # type: ignore[arg-type]


def test_several_requests_are_under_way_but_no_more_than_may_be_held(pool) -> None:
    objects = FakeObjects()
    objects.gate = threading.Event()
    wanted = wanted_of(objects, *((0, 10_000 * i, 4000) for i in range(8)))
    with RangeFetch(pool, wanted) as fetch:
        assert pool.num_requests == 3 and pool.held_bytes == 12_000
        objects.gate.set()
        fetch.take(objects, 0, 0, 4000)  # type: ignore[arg-type]
        assert pool.num_requests == 4
    assert pool.held_bytes == 0 and pool.num_requests == 4


def test_an_error_is_that_of_the_range_in_turn(pool) -> None:
    objects = FakeObjects()
    objects.bad = {20_000, 40_000}
    with RangeFetch(pool, wanted_of(objects, *((0, 10_000 * i, 10) for i in range(6)))) as fetch:
        for i in range(2):
            assert fetch.take(objects, 0, 10_000 * i, 10) is not None  # type: ignore[arg-type]
        with pytest.raises(SourceUnreadable, match="fails at 20000"):
            fetch.take(objects, 0, 20_000, 10)  # type: ignore[arg-type]
    assert pool.held_bytes == 0
