"""Ranks that were given different jobs are told so, with both values; who fails before is named to those who wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest

from tests.support.worlds import run_ranks
from torchmix.errors import RankLost, RecipeError
from torchmix.parallel.agreement import agree, announcing_failures, await_key, told_by_all

FACTS = {"topology": "tp 1 x dp 2", "micro_batch_size": "1"}


class OneStore:
    """The store of a job whose ranks are threads."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        self.timeout = timeout
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        with self._lock:
            self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        with self._lock:
            total = int(self.values.get(key, 0)) + amount
            self.values[key] = str(total)
            return total


def errors_of(programs: list[Callable[[], object]]) -> list[BaseException | None]:
    """What each rank is told, None if nothing."""

    def outcome(program: Callable[[], object]) -> BaseException | None:
        try:
            program()
        except (RankLost, RecipeError, OSError) as error:
            return error
        return None

    return run_ranks(programs, outcome)


def ask(facts_of_rank: list[dict[str, str]]) -> list[BaseException | None]:
    store, size = OneStore(), len(facts_of_rank)
    return errors_of(
        [
            lambda rank=rank, facts=facts: agree(store, rank=rank, world_size=size, facts=facts)
            for rank, facts in enumerate(facts_of_rank)
        ]
    )


def test_equal_ranks_agree() -> None:
    assert ask([FACTS, dict(reversed(FACTS.items())), FACTS]) == [None] * 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({**FACTS, "micro_batch_size": "2"}, "micro_batch_size 2, rank 0 1."),
        ({**FACTS, "max_steps": "7"}, "max_steps 7, rank 0 missing."),
        ({"topology": "tp 2"}, "micro_batch_size missing, rank 0 1; topology tp 2, rank 0 tp 1 x dp 2."),
    ],
)
def test_a_rank_that_differs_is_told_all_that_differs_and_the_others_who_it_is(
    given: dict[str, str], text: str
) -> None:
    told = ask([FACTS, FACTS, given])
    assert str(told[2]).startswith("build_loader: rank 2 was given other values than rank 0: ")
    assert isinstance(told[2], RecipeError) and text in str(told[2])
    for other in told[:2]:
        assert isinstance(other, RankLost) and other.rank == 2 and text in str(other)


def test_each_loader_of_a_job_asks_under_a_key_of_its_own() -> None:
    store = OneStore()
    for number in (1, 2):
        agree(store, rank=0, world_size=1, facts=FACTS)
        assert {f"torchmix/agreement/{number}", f"torchmix/arrivals/{number}"} <= {*store.values}
        assert store.values["torchmix/met/agreement/0"] == str(number)


def test_ranks_that_have_met_elsewhere_meet_new_ones_over_another_store() -> None:
    agree(OneStore(), rank=0, world_size=1, facts=FACTS)
    assert ask([FACTS, FACTS]) == [None, None]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_is_named_to_those_who_wait(failing: int) -> None:
    store = OneStore()

    def fail() -> None:
        with announcing_failures(store, rank=failing):
            raise FileNotFoundError("no recipe.yaml here")

    programs: list[Callable[[], object]] = [
        lambda rank=rank: agree(store, rank=rank, world_size=4, facts=FACTS) for rank in range(3)
    ]
    programs[failing] = fail
    programs.append(lambda: await_key(store, "torchmix/liveness/1", rank=3))
    told = errors_of(programs)
    assert isinstance(told.pop(failing), FileNotFoundError)
    for other in told:
        assert isinstance(other, RankLost) and other.rank == failing
        assert "failed before the loaders were built: FileNotFoundError: no recipe.yaml here" in str(other)


def test_a_failure_that_all_ranks_share_does_not_stop_their_next_loaders() -> None:
    store = OneStore()
    for rank in range(2):
        with suppress(ValueError), announcing_failures(store, rank=rank):
            raise ValueError("one recipe for all, with a mistake")

    def build(rank: int) -> None:
        with announcing_failures(store, rank=rank):
            agree(store, rank=rank, world_size=2, facts=FACTS)

    assert errors_of([lambda: build(0), lambda: build(1)]) == [None, None]


def test_what_fails_after_the_agreement_is_told_by_others() -> None:
    store = OneStore()
    with suppress(ValueError), announcing_failures(store, rank=0):
        agree(store, rank=0, world_size=1, facts=FACTS)
        raise ValueError("liveness tells of this")
    assert "torchmix/failure/1" not in store.values


def test_a_rank_that_never_comes_is_missed_after_the_timeout_of_the_store() -> None:
    store = OneStore(timeout=timedelta(seconds=0.02))
    with pytest.raises(RankLost, match=r"some ranks have not built their loaders within 0 s; all ranks of the job"):
        agree(store, rank=0, world_size=2, facts=FACTS)
    with pytest.raises(RankLost, match="rank 0 has not said what it runs"):
        agree(OneStore(timeout=timedelta(seconds=0.02)), rank=1, world_size=2, facts=FACTS)


def test_a_store_that_ends_with_its_rank_is_told() -> None:
    store = OneStore()

    def fail(keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")

    store.check = fail  # type: ignore[method-assign]
    with pytest.raises(RankLost, match=r"the job's store is gone, .* serves it: Connection reset by peer"):
        agree(store, rank=1, world_size=2, facts=FACTS)


def test_who_waits_looks_for_other_reasons_to_stop() -> None:
    def check() -> None:
        raise RankLost("rank 3 was killed", 3)

    with pytest.raises(RankLost, match="rank 3 was killed"):
        agree(OneStore(), rank=0, world_size=2, facts=FACTS, check=check)


def test_each_rank_hears_what_all_have_told_each_time_they_meet() -> None:
    store = OneStore()

    def meet(rank: int) -> list[list[str]]:
        return [told_by_all(store, f"{word} {rank}", rank=rank, world_size=3) for word in ("one", "two")]

    expected = [[f"{word} {rank}" for rank in range(3)] for word in ("one", "two")]
    assert run_ranks([0, 1, 2], meet) == [expected] * 3
