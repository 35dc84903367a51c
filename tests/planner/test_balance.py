from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import Placement, in_hash_order, in_rows, report

LAYOUTS = [(1, 1, 1), (1, 4, 3), (2, 1, 5), (4, 1, 8), (3, 2, 4), (8, 4, 2), (2, 8, 1), (16, 1, 1)]
"""(dp, micro_batch_size, microbatches)."""


def random_costs(seed: int, count: int) -> np.ndarray:
    """Costs as samples have them (skewed), or awkward: all equal, few values, one giant."""
    rng = random.Random(seed)
    kinds = {
        "skewed": lambda: 1000 + int(1000 * rng.paretovariate(1.5)),
        "equal": lambda: 777,
        "few": lambda: rng.choice([10, 20, 30]),
        "giant": lambda: 10**12 if rng.random() < 0.05 else 10,
    }
    kind = kinds[list(kinds)[seed % 4]]
    return np.array([kind() for _ in range(count)], np.int64)


def slowest_rank_sum(costs: np.ndarray, placement: Placement, dp: int) -> int:
    """What a synchronous step pays: microbatch by microbatch, the rank that takes longest."""
    total = 0
    for microbatch in set(placement.microbatch_of_sample.tolist()):
        of_rank = [0] * dp
        for sample in np.flatnonzero(placement.microbatch_of_sample == microbatch).tolist():
            of_rank[int(placement.dp_rank_of_sample[sample])] += int(costs[sample])
        total += max(of_rank)
    return total


def least_slowest_rank_sum(costs: list[int], dp: int, micro_batch_size: int) -> int:
    """Least cost of any placement, by trying all of them."""
    if not costs:
        return 0
    best = None
    for others in itertools.combinations(range(1, len(costs)), dp * micro_batch_size - 1):
        row = [costs[0], *(costs[i] for i in others)]
        rest = [costs[i] for i in range(1, len(costs)) if i not in others]
        cost = least_row(row, micro_batch_size) + least_slowest_rank_sum(rest, dp, micro_batch_size)
        best = cost if best is None else min(best, cost)
    assert best is not None
    return best


def least_row(row: list[int], micro_batch_size: int) -> int:
    """Least cost of the dearest rank's share of one microbatch's samples."""
    if len(row) == micro_batch_size:
        return sum(row)
    shares = itertools.combinations(range(1, len(row)), micro_batch_size - 1)
    return min(
        max(
            row[0] + sum(row[i] for i in others),
            least_row([row[i] for i in range(1, len(row)) if i not in others], micro_batch_size),
        )
        for others in shares
    )


@pytest.mark.parametrize(("dp", "micro_batch_size", "microbatches"), LAYOUTS)
@pytest.mark.parametrize("method", ["rows", "hash order"])
def test_every_bin_gets_its_samples_in_the_order_of_their_numbers(dp, micro_batch_size, microbatches, method):
    num_samples = dp * micro_batch_size * microbatches
    for seed in range(8):
        costs = random_costs(seed, num_samples)
        if method == "rows":
            placement = in_rows(costs, Layout(dp=dp, micro_batch_size=micro_batch_size))
        else:
            placement = in_hash_order(num_samples, Layout(dp=dp, micro_batch_size=micro_batch_size))
        samples_of_bin: dict[tuple[int, int], list[int]] = {}
        for sample in range(num_samples):
            at = int(placement.dp_rank_of_sample[sample]), int(placement.microbatch_of_sample[sample])
            assert int(placement.slot_of_sample[sample]) == len(samples_of_bin.setdefault(at, []))
            samples_of_bin[at].append(sample)
        bins = set(itertools.product(range(dp), range(microbatches)))
        assert set(samples_of_bin) == bins
        assert {len(samples) for samples in samples_of_bin.values()} == {micro_batch_size}


def test_hash_order_deals_runs_of_samples_to_the_ranks():
    placement = in_hash_order(12, Layout(dp=2, micro_batch_size=3))
    assert placement.dp_rank_of_sample.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert placement.microbatch_of_sample.tolist() == [0] * 6 + [1] * 6
    assert placement.slot_of_sample.tolist() == [0, 1, 2] * 4


def test_rows_of_single_samples_are_as_cheap_as_any_placement():
    rng = random.Random(50)
    for dp, microbatches in ((2, 3), (3, 2), (2, 4), (4, 2), (1, 5)):
        for _ in range(12):
            costs = [rng.choice([rng.randint(1, 9), rng.randint(1, 1000)]) for _ in range(dp * microbatches)]
            placement = in_rows(np.array(costs), Layout(dp=dp, micro_batch_size=1))
            assert slowest_rank_sum(np.array(costs), placement, dp) == least_slowest_rank_sum(costs, dp, 1), costs


def test_rows_of_several_samples_are_near_the_best_placement_and_better_than_hash_order():
    rng = random.Random(51)
    made = least = hashed = 0
    for _ in range(25):
        costs = np.array([1000 + int(1000 * rng.paretovariate(1.5)) for _ in range(8)])
        placement = in_rows(costs, Layout(dp=2, micro_batch_size=2))
        made += slowest_rank_sum(costs, placement, 2)
        least += least_slowest_rank_sum(costs.tolist(), 2, 2)
        hashed += slowest_rank_sum(costs, in_hash_order(8, Layout(dp=2, micro_batch_size=2)), 2)
    assert least <= made < 1.05 * least, (made, least)
    assert made - least < 0.5 * (hashed - least), (made, hashed, least)


def test_rows_also_even_out_the_sums_of_the_ranks():
    for seed in range(0, 40, 4):  # skewed ones
        costs = random_costs(seed, 8 * 32)
        placement = in_rows(costs, Layout(dp=8, micro_batch_size=1))
        sums = np.bincount(placement.dp_rank_of_sample, weights=costs, minlength=8)
        # Each block adds at most its own spread, and blocks are sorted: the sums differ by the dearest sample at most.
        assert sums.max() - sums.min() <= costs.max()


def test_the_dearest_sample_of_a_block_goes_to_the_rank_that_has_least_and_ties_to_lower_numbers():
    # Blocks (9 8), (7 7), (1 1): 9 to rank 0, 8 to rank 1; then rank 1 has least, then rank 0 (16 = 15 + 1).
    costs = np.array([1, 7, 9, 1, 8, 7])
    placement = in_rows(costs, Layout(dp=2, micro_batch_size=1))
    assert placement.dp_rank_of_sample.tolist() == [1, 1, 0, 0, 1, 0]
    equal = in_rows(np.full(6, 5), Layout(dp=2, micro_batch_size=1))
    assert equal.dp_rank_of_sample.tolist() == [0, 1] * 3


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7, 8, 33])
def test_microbatches_grow_towards_the_middle_and_shrink_after_it(microbatches):
    costs = np.array(random.Random(52).sample(range(10**6), 2 * microbatches))
    placement = in_rows(costs, Layout(dp=2, micro_batch_size=1))
    dearest = [int(costs[placement.microbatch_of_sample == m].max()) for m in range(microbatches)]
    peak = dearest.index(max(dearest))
    assert dearest == sorted(dearest[: peak + 1]) + sorted(dearest[peak + 1 :], reverse=True)
    assert abs(peak - (microbatches - 1) / 2) <= 0.5
    # Small at both ends: the two cheapest are the first and the last.
    assert {0, microbatches - 1} >= {dearest.index(each) for each in sorted(dearest)[:2]}


@pytest.mark.parametrize(("dp", "micro_batch_size", "microbatches"), LAYOUTS)
def test_the_report_gives_what_placements_cost_and_a_bound_that_holds(dp, micro_batch_size, microbatches):
    num_samples = dp * micro_batch_size * microbatches
    rng = np.random.default_rng(53)
    for seed in range(8):
        costs = random_costs(seed, num_samples)
        placement = in_rows(costs, Layout(dp=dp, micro_batch_size=micro_batch_size))
        made = report(costs, placement, Layout(dp=dp, micro_batch_size=micro_batch_size))
        plain = in_hash_order(num_samples, Layout(dp=dp, micro_batch_size=micro_batch_size))
        assert made.cost == slowest_rank_sum(costs, placement, dp)
        assert made.hash_order_cost == slowest_rank_sum(costs, plain, dp)
        assert made.ratio == made.cost / made.lower_bound >= 1
        assert made.hash_order_ratio == made.hash_order_cost / made.lower_bound >= 1
        for _ in range(5):
            shuffled = rng.permutation(costs)
            assert slowest_rank_sum(shuffled, plain, dp) >= made.lower_bound
        if micro_batch_size == 1:
            assert made.cost <= made.hash_order_cost


def test_the_bound_is_below_the_best_placement_and_reached_where_it_can_be():
    rng = random.Random(54)
    for dp, micro_batch_size, microbatches in ((2, 2, 2), (2, 1, 4), (3, 1, 2), (1, 2, 3)):
        for _ in range(10):
            costs = [rng.randint(1, 50) for _ in range(dp * micro_batch_size * microbatches)]
            placement = in_rows(np.array(costs), Layout(dp=dp, micro_batch_size=micro_batch_size))
            made = report(np.array(costs), placement, Layout(dp=dp, micro_batch_size=micro_batch_size))
            assert made.lower_bound <= least_slowest_rank_sum(costs, dp, micro_batch_size), costs
    for costs in (np.full(8, 6), np.array([100, 1, 1, 1])):
        placement = in_rows(costs, Layout(dp=4, micro_batch_size=1))
        made = report(costs, placement, Layout(dp=4, micro_batch_size=1))
        assert made.ratio == 1


def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_would():
    with pytest.raises(TopologyError) as raised:
        Layout(dp=8, micro_batch_size=3).num_microbatches(100)
    text = str(raised.value)
    assert "100 samples" in text and "dp 8 x micro_batch_size 3 = 24" in text and "96 or 120" in text
    with pytest.raises(TopologyError, match=r"batch\.samples 24 \("):
        Layout(dp=8, micro_batch_size=3).num_microbatches(4)  # 0 samples would divide, and is no answer
    with pytest.raises(TopologyError):
        in_rows(np.ones(6, np.int64), Layout(dp=4, micro_batch_size=1))
    with pytest.raises(TopologyError):
        in_hash_order(6, Layout(dp=4, micro_batch_size=1))
    assert Layout(dp=8, micro_batch_size=3).num_microbatches(96) == 4
