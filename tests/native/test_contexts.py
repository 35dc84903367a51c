"""The schedule of runs of ranks: the native call equals its reference, and refuses what is out of bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.planner.test_contexts import random_case
from tests.support.native import native_or_not
from torchmix.errors import NativeError
from torchmix.native.calls import Contexts
from torchmix.native.load import Array, array_of, num_calls, run
from torchmix.planner.contexts import OF_BIN, RunCosts, RunSchedule, Search, searched, searched_plainly


def assert_same(one: Search, other: Search, about: object) -> None:
    assert one[1:] == other[1:], about
    for name in RunSchedule.__struct_fields__:
        assert np.array_equal(getattr(one.schedule, name), getattr(other.schedule, name)), (about, name)


def test_it_equals_its_reference() -> None:
    before, in_order = num_calls().get("tm_contexts", 0), 0
    with native_or_not(True):
        for seed in range(300):
            tokens, costs, _ = random_case(seed)
            lengths = np.array(tokens, np.int64)
            found = searched(lengths, costs)
            assert_same(found, searched_plainly(lengths, costs), seed)
            in_order += found.is_in_order
    assert num_calls()["tm_contexts"] == before + 300 and in_order > 0


def test_it_equals_its_reference_for_thousands_of_samples() -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        _, costs, _ = random_case(2)
        costs = replace(
            costs, num_ranks=96, sizes=(1, 2, 4, 32, 96), rank_tokens=4096, per_token=1_000_000, per_pair=20
        )
        lengths = np.minimum(1 + rng.lognormal(6, 2, 5000).astype(np.int64), (4096, 4097, 96 * 4000, 3)[seed])
        with native_or_not(True):
            assert_same(searched(lengths, costs), searched_plainly(lengths, costs), seed)


def test_the_longest_samples_are_sorted_and_longer_ones_refused() -> None:
    """The square of a length is an int64."""
    numbers = {"per_token": 3, "per_pair": 0, "per_exchanged": 1, "per_microbatch": 0}
    costs = RunCosts(**numbers, rank_tokens=2**34, align=1, sizes=(1, 2, 4), num_ranks=4)
    most = 3_037_000_499
    lengths = np.concatenate([np.random.default_rng(1).integers(1, most, 60), [most, 1, most, 2**31 + 1, 2**31 + 1]])
    with native_or_not(True):
        assert_same(searched(lengths, costs), searched_plainly(lengths, costs), most)
        for longer in (most + 1, 2**32 - 1, 2**32, 2**33):
            with pytest.raises(NativeError, match="costs exceed 62 bits"):
                run(call_of(np.array([5, longer, 9]), costs))


def call_of(tokens: np.ndarray, costs: RunCosts, **forged: Any) -> Contexts:
    """A call, with arrays and numbers that are as they should be or forged."""
    arrays = {name: np.empty(len(tokens), np.int64) for name in ("bin_of_sample", *OF_BIN)}
    arrays |= {"tokens": tokens, "sizes": np.array(costs.sizes, np.int64)}
    numbers = {name: getattr(costs, name) for name in RunCosts.__struct_fields__ if name != "sizes"}
    arrays |= {name: value for name, value in forged.items() if name in arrays}
    numbers |= {name: value for name, value in forged.items() if name in numbers}
    call = Contexts(**{name: array_of(array, np.int64) for name, array in arrays.items()}, **numbers)
    call.kept = arrays
    return call


COSTS = RunCosts(
    per_token=1000,
    per_pair=3,
    per_exchanged=8,
    per_microbatch=5,
    rank_tokens=64,
    align=1,
    sizes=(1, 2, 4),
    num_ranks=4,
)
FORGED: list[tuple[dict[str, Any], str]] = [
    ({"tokens": np.zeros(0, np.int64)}, "no samples"),
    ({"tokens": np.array([5, 0, 9])}, "entry 1: a sample fits no run"),
    ({"tokens": np.array([5, -(2**63), 9])}, "entry 1: a sample fits no run"),
    ({"tokens": np.array([5, 9, 257])}, "entry 2: a sample fits no run"),
    ({"tokens": np.array([2**63 - 1, 9, 7])}, "entry 0: a sample fits no run"),
    ({"sizes": np.zeros(0, np.int64)}, "no sizes"),
    ({"sizes": np.arange(1, 66)}, "no sizes, or too many"),
    ({"sizes": np.array([0, 4])}, "entry 0: sizes do not ascend"),
    ({"sizes": np.array([1, 4, 2])}, "entry 2: sizes do not ascend"),
    ({"sizes": np.array([1, 2**62])}, "entry 1: sizes do not ascend"),
    *(({name: np.empty(2, np.int64)}, "not an entry per sample") for name in ("bin_of_sample", *OF_BIN)),
    *(
        ({name: value}, "out of range")
        for name in ("num_ranks", "align", "rank_tokens", "stages", "microbatches_of")
        for value in (0, -1, -(2**63), 2**63 - 1)
    ),
    *(({name: -1}, "a cost is negative") for name in ("per_token", "per_pair", "per_exchanged", "per_microbatch")),
    *(
        ({name: 2**63 - 1}, "costs exceed 62 bits")
        for name in ("per_token", "per_pair", "per_exchanged", "per_microbatch")
    ),
    ({"per_token": 2**53, "stages": 999}, "costs exceed 62 bits"),
]


@pytest.mark.parametrize(("forged", "message"), FORGED)
def test_forged_arguments_are_refused(forged: dict[str, Any], message: str) -> None:
    tokens = np.array([5, 200, 9], np.int64)
    with native_or_not(True):
        assert run(call_of(tokens, COSTS)) == 0
        with pytest.raises(NativeError, match=message):
            given = forged.get("tokens", tokens)
            run(call_of(given, COSTS, **{name: value for name, value in forged.items() if name != "tokens"}))


def test_a_forged_count_is_refused() -> None:
    with native_or_not(True):
        call = call_of(np.array([5, 200, 9], np.int64), COSTS)
        for count in (-1, 2**31, 2**62):
            call.tokens = Array(call.tokens.at, count)
            with pytest.raises(NativeError, match="no samples, or too many"):
                run(call)
