"""Methods of balance: items with costs -> bins."""

from __future__ import annotations

import heapq
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError, TorchmixError
from torchmix.lazy_names import imported
from torchmix.native.calls import FitItems
from torchmix.native.load import array_of, is_native, run
from torchmix.planner.balance import Placement, in_rows

# --- What a placement is judged by, and the least that any placement of the same items costs.
#
# No placement of the same items is below the bound. Cost: a few array operations.
#
#     rows       sum over microbatches of the slowest rank: a synchronous step, as with FSDP, or experts over ranks
#     max        the costliest bin
#     rank       the slowest rank's sum: ranks meet once a step
#     pipeline   `rows` and p - 1 times the costliest microbatch: 1F1B with p stages, which all microbatches fill and
#                drain
#
# Source for `pipeline`: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, with microbatches of different cost.

Objective = Literal["rows", "max", "rank", "pipeline"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


def objective_of(cost_of_bin: Int64Array, objective: str, *, stages: int = 1) -> int:
    """Cost of a placement.

    Args:
        cost_of_bin: int64 [buckets, bins].
        objective: One of OBJECTIVES.
        stages: Stages of the pipeline, for `pipeline`.
    """
    if not cost_of_bin.size:
        return 0
    of_row = cost_of_bin.max(axis=0)
    if objective == "max":
        return int(of_row.max())
    if objective == "rank":
        return int(cost_of_bin.sum(axis=1).max())
    return int(of_row.sum()) + ((stages - 1) * int(of_row.max()) if objective == "pipeline" else 0)


def lower_bound_of(cost: Int64Array, num_buckets: int, num_bins: int, objective: str, *, stages: int) -> int:
    """A bound that holds for every placement of these items; at least 1.

    Args:
        cost: int64 [n] of each item.
        num_buckets, num_bins: How many the placement has.
        objective, stages: As in `objective_of`.
    """
    total, largest = int(cost.sum()), int(cost.max(initial=0))
    of_bin = max(-(-total // (num_buckets * num_bins)), largest)
    if objective == "max":
        return max(of_bin, 1)
    of_step = max(-(-total // num_buckets), largest)
    return max(of_step + ((stages - 1) * of_bin if objective == "pipeline" else 0), 1)


# --- Bins of any number of items: how full they are, and the items that a cap of memory keeps out.
#
# A cap is hard. Cost: 1 us an item where the cap matters.


def sums_of_bins(values: Int64Array, bin_of_item: Int64Array, num_bins: int) -> Int64Array:
    """int64 [num_bins] sums of `values`."""
    sums = np.zeros(num_bins, np.int64)
    np.add.at(sums, bin_of_item, values)
    return sums


def lpt_within(cost: Int64Array, memory: Int64Array, num_bins: int, cap: int) -> Int64Array:
    """Longest processing time, each item to the least loaded bin that has room for it.

    Args:
        cost: int64 [n], 0 or more.
        memory: int64 [n] bytes of each item.
        num_bins: 1 or more.
        cap: Most bytes of a bin.

    Raises:
        PlanError: An item exceeds the cap, or no bin has room for one; names the item, its bytes and what would fit.
    """
    if len(memory) and memory.max() > cap:
        item = int(memory.argmax())
        raise PlanError(f"item {item} takes {int(memory[item])} bytes, the cap of one consumer is {cap}")
    room = [cap] * num_bins
    heap = [(0, number) for number in range(num_bins)]
    bin_of_item = np.empty(len(cost), np.int64)
    # Large items first where memory is short: the cost of an item rises with its bytes in every model of ours.
    for item in np.lexsort((np.arange(len(cost)), -memory, -cost)).tolist():
        needed, passed = int(memory[item]), []
        while heap and room[heap[0][1]] < needed:
            passed.append(heapq.heappop(heap))
        if not heap:
            raise PlanError(
                f"item {item} takes {needed} bytes, and the emptiest of {num_bins} consumers has room for {max(room)} "
                f"of {cap}; all items take {int(memory.sum())} bytes, so a cap of {-(-int(memory.sum()) // num_bins)} "
                f"is the least that might do"
            )
        load, number = heap[0]
        heapq.heapreplace(heap, (load + int(cost[item]), number))
        room[number] -= needed
        bin_of_item[item] = number
        for each in passed:
            heapq.heappush(heap, each)
    return bin_of_item


# --- Items dealt to bins in turn, costliest first: equal counts, zigzags, and groups of neighbouring bins.
#
# Counts differ by at most one, and are equal where the bins divide the items; ties go to the lower item, then to the
# lower bin. Cost: one sort, and a sort of the bins for each block of items.
#
# Where all bins hold as many items, no method is better than the spread of costs allows: few large items beside many
# small ones stay apart only with bins of any size.


def by_descending_cost(cost: Int64Array) -> Int64Array:
    """Numbers of the items, costliest first; equal ones in ascending order."""
    order: Int64Array = np.argsort(-cost, kind="stable")
    return order


def zigzag(cost: Int64Array, num_bins: int) -> Int64Array:
    """Deal items forwards, then backwards, and so on: 0 1 2 2 1 0 0 1 2."""
    turn, place = np.divmod(np.arange(len(cost), dtype=np.int64), num_bins)
    bin_of_item = np.empty(len(cost), np.int64)
    bin_of_item[by_descending_cost(cost)] = np.where(turn % 2 == 0, place, num_bins - 1 - place)
    return bin_of_item


def equal_counts(cost: Int64Array, num_bins: int) -> Int64Array:
    """Longest processing time with equal counts: of each block of items the costliest goes to the least loaded bin.

    Source: the folding of balanced LPT, Coffman, Frederickson and Lueker 1984.
    """
    order = by_descending_cost(cost)
    load = np.zeros(num_bins, np.int64)
    bin_of_item = np.empty(len(cost), np.int64)
    for start in range(0, len(cost), num_bins):
        block = order[start : start + num_bins]
        least = np.argsort(load, kind="stable")[: len(block)]
        bin_of_item[block] = least
        load[least] += cost[block]
    return bin_of_item


def groups_of_bins(num_bins: int, group_size: int) -> Int64Array:
    """int64 [num_bins] group of each bin: neighbours of at most `group_size`, as even as they can be."""
    num_groups = -(-num_bins // group_size)
    groups: Int64Array = np.arange(num_bins, dtype=np.int64) * num_groups // num_bins
    return groups


def deal_to_groups(cost: Int64Array, group_of_bin: Int64Array) -> Int64Array:
    """int64 [n] group of each item: of each block of as many items as bins, each group gets as many as it has bins.

    Groups take turns inside a block, and every other block is dealt backwards, so that all get like costs.
    """
    num_bins = len(group_of_bin)
    size = np.bincount(group_of_bin)
    start = np.cumsum(size) - size
    place = (np.arange(num_bins) - start[group_of_bin]) * 2 + 1  # the middle of a bin's part of its group
    turns = group_of_bin[np.lexsort((group_of_bin, place * num_bins // size[group_of_bin]))]
    block, at = np.divmod(np.arange(len(cost), dtype=np.int64), num_bins)
    group_of_item = np.empty(len(cost), np.int64)
    group_of_item[by_descending_cost(cost)] = turns[np.where(block % 2 == 0, at, num_bins - 1 - at)]
    return group_of_item


# --- Karmarkar and Karp's differencing: partial partitions are joined, largest against smallest, until one is left.
#
# With equal counts, bins differ by no item where the bins divide the items. Cost: O(n x bins x log n) in Python, some
# microseconds an item and bin; a plan of a large job takes seconds. On the costs of documents it gains at most some
# tenths of a percent over `lpt`; it is here to be compared with.
#
# Source: Karmarkar and Karp 1982, for k bins as in Korf 2009.


def karmarkar_karp(cost: Int64Array, num_bins: int, *, has_equal_counts: bool = False) -> Int64Array:
    """Bin of each item.

    Args:
        cost: int64 [n], 0 or more.
        num_bins: 1 or more.
        has_equal_counts: Join blocks of `num_bins` items, one in each bin, instead of single items.
    """
    order = by_descending_cost(cost).tolist()
    costs = cost.tolist()
    width = num_bins if has_equal_counts else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), width)):
        bins = [(costs[item], [item]) for item in order[start : start + width]]
        bins += [(0, [])] * (num_bins - len(bins))  # sorted: costliest first
        heap.append((bins[-1][0] - bins[0][0], number, bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda each: -each[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    bin_of_item = np.zeros(len(cost), np.int64)
    for number, (_, items) in enumerate(heap[0][2] if heap else []):
        bin_of_item[items] = number
    return bin_of_item


# --- Longest processing time: the costliest item first, each to the bin with the least cost so far.
#
# The result is that of a heap, item by item; ties go to the lower item, then to the lower bin. Cost: about 60 ns an
# item, and one sort of the bins for as many items as there are bins. The heap alone takes 450 ns an item.
#
# The heap's choices are made for a run of items at once. With bins sorted by load, item i goes to bin i for as long as
# no bin that has just been given an item is lower than the next one. Where runs are short, the heap itself continues.
#
# Source: Graham 1969. The vectorised form is our own.

SHORT_RUN = 6
"""A run of fewer items is slower than the heap."""
HEAP_RUN = 64
"""Items that the heap places before runs are tried again."""


def lpt(cost: Int64Array, num_bins: int) -> Int64Array:
    """Bin of each item.

    Args:
        cost: int64 [n], 0 or more; their sum fits 63 bits.
        num_bins: 1 or more.

    Returns:
        int64 [n] in [0, num_bins).
    """
    order = np.argsort(-cost, kind="stable")
    sorted_cost = cost[order]
    bin_of_sorted = np.empty(len(cost), np.int64)
    load = np.zeros(num_bins, np.int64)
    at = 0
    while at < len(cost):
        by_load = np.argsort(load, kind="stable")
        width = min(num_bins, len(cost) - at)
        ascending = load[by_load[:width]]
        given = ascending + sorted_cost[at : at + width]
        lowest_given = np.minimum.accumulate(given)[:-1]
        # A bin that was given an item may be equal to the next one: the heap would ask which number is lower.
        is_over = ascending[1:] >= lowest_given
        run = int(np.argmax(is_over)) + 1 if is_over.any() else width
        bins = by_load[:run]
        bin_of_sorted[at : at + run] = bins
        load[bins] = given[:run]
        at += run
        if run < min(SHORT_RUN, num_bins):
            at = _by_heap(sorted_cost, bin_of_sorted, load, at, min(at + HEAP_RUN, len(cost)))
    bin_of_item = np.empty(len(cost), np.int64)
    bin_of_item[order] = bin_of_sorted
    return bin_of_item


def _by_heap(cost: Int64Array, bin_of_item: Int64Array, load: Int64Array, start: int, stop: int) -> int:
    """Place the items from `start` to `stop`; fills `bin_of_item` and `load`, returns `stop`."""
    if start >= stop:
        return start
    heap = list(zip(load.tolist(), range(len(load)), strict=True))
    heapq.heapify(heap)
    chosen: list[int] = []
    for value in cost[start:stop].tolist():
        lowest, number = heap[0]
        heapq.heapreplace(heap, (lowest + value, number))
        chosen.append(number)
        load[number] = lowest + value
    bin_of_item[start:stop] = chosen
    return stop


# --- Bins below a limit: the costliest item comes first, and each goes to a bin that it leaves within the limit.
#
# Where items have homes, an item goes to the least loaded bin of its home, as long as that has room. Else it goes to
# the least loaded bin of all, or to the first one with room. First fit packs tightly, so that a lower limit holds; with
# the least loaded bins more items stay at home. Cost: 50 ns an item by the native call, else 3 us.
#
# A tree finds both: the leaves are the loads of the bins, and each node has the least load below it.


def fitted(
    cost: Int64Array,
    num_bins: int,
    limit: int,
    *,
    takes_first: bool,
    home: Int64Array | None = None,
    num_homes: int = 1,
) -> Int64Array | None:
    """Bin of each item; ties go to the lower item, then to the lower bin.

    Args:
        cost: int64 [n], 0 or more.
        num_bins: 1 or more, a multiple of `num_homes`.
        limit: Most that a bin may cost, below 2^62.
        takes_first: Away from home an item goes to the first bin with room, else to the least loaded one.
        home: int64 [n] in [0, num_homes); home h has bins h * num_bins // num_homes to (h + 1) * num_bins // num_homes.
        num_homes: 1 or more.

    Returns:
        int64 [n] in [0, num_bins); None where an item has no room.
    """
    order = by_descending_cost(cost)
    homes = np.zeros(0, np.int64) if home is None or num_homes == 1 else home[order]
    fit = (_fitted if is_native() else fitted_plainly)(cost[order], homes, num_bins, num_homes, limit, takes_first)
    if fit is None:
        return None
    bin_of_item = np.empty(len(cost), np.int64)
    bin_of_item[order] = fit
    return bin_of_item


def _fitted(
    cost: Int64Array, home: Int64Array, num_bins: int, num_homes: int, limit: int, takes_first: bool
) -> Int64Array | None:
    found, least = np.empty(len(cost), np.int64), np.empty(2 << (num_bins - 1).bit_length(), np.int64)
    call = FitItems(
        cost=array_of(cost, np.int64),
        home=array_of(home, np.int64),
        bin=array_of(found, np.int64),
        least=array_of(least, np.int64),
        num_bins=num_bins,
        num_homes=num_homes,
        limit=limit,
        takes_first=takes_first,
    )
    run(call)
    return found if call.num_placed == len(cost) else None


def fitted_plainly(
    cost: Int64Array, home: Int64Array, num_bins: int, num_homes: int, limit: int, takes_first: bool
) -> Int64Array | None:
    """The reference of the native call, for items in the order in which they are placed; `home` may be empty."""
    first, width = 1 << (num_bins - 1).bit_length(), num_bins // num_homes
    least = [0] * (first + num_bins) + [1 << 63] * (first - num_bins)
    for node in range(first - 1, 0, -1):
        least[node] = least[2 * node]  # the left one is never above
    found: list[int] = []
    homes = home.tolist() if len(home) else [None] * len(cost)
    for value, at_home in zip(cost.tolist(), homes, strict=True):
        most, node = limit - value, 0  # the most that a bin may have to have room
        if at_home is not None:
            loads = least[first + at_home * width : first + (at_home + 1) * width]
            lowest = min(loads)
            node = first + at_home * width + loads.index(lowest) if lowest <= most else 0
        if not node:
            if least[1] > most:
                return None
            node = 1
            while node < first:
                node *= 2
                node += least[node] > most if takes_first else least[node + 1] < least[node]
        found.append(node - first)
        least[node] += value
        while node > 1:
            node //= 2
            least[node] = min(least[2 * node], least[2 * node + 1])
    return np.array(found, np.int64)


def near_home(cost: Int64Array, home: Int64Array, num_bins: int, num_homes: int, limit: int) -> Iterator[Int64Array]:
    """Placements below a limit with items at home; the first has the most there, and there may be none.

    Args:
        cost, home, num_bins, num_homes, limit: As of `fitted`.
    """
    for takes_first in (False, True):
        found = fitted(cost, num_bins, limit, takes_first=takes_first, home=home, num_homes=num_homes)
        if found is not None:
            yield found


# --- Longest processing time, or first fit below a lower limit where one is found: with two to six items a bin, the
# costliest bin of LPT is 2 to 6 % above the bound, and that of first fit 1 or 2 %.
#
# The result is never costlier than that of LPT. The limit is bisected between the bound and LPT's costliest bin, down
# to a thousandth, so many items a bin, where LPT is as near, cost nothing more.
#
# Source: MULTIFIT, Coffman, Garey and Johnson 1978: at most 13/11 of the optimum, LPT at most 4/3.

CLOSE_BITS = 10
"""The bisection ends within the bound / 2^10."""


def least_of_bins(cost: Int64Array, num_bins: int) -> int:
    """A bound that the costliest bin of no placement is below; 0 without items.

    Args:
        cost: int64 [n], 0 or more.
        num_bins: 1 or more.
    """
    if not len(cost):
        return 0
    before = np.concatenate([[0], np.cumsum(-np.sort(-cost))])
    # Of the costliest k x bins + 1 items some bin has k + 1, and these cost no less than the last k + 1 of them.
    full = np.arange((len(cost) - 1) // num_bins + 1)
    of_counts = before[full * num_bins + 1] - before[full * num_bins - full]
    least = max(-(-int(cost.sum()) // num_bins), int(of_counts.max()))
    unit = max(1, int(np.gcd.reduce(cost)))  # a sum of multiples is one: whole chunks of sound cannot be divided
    return -(-least // unit) * unit


def lpt_or_fit(cost: Int64Array, num_bins: int) -> Int64Array:
    """Bin of each item; arguments and result as of `lpt`."""
    found, least = lpt(cost, num_bins), least_of_bins(cost, num_bins)
    largest = int(sums_of_bins(cost, found, num_bins).max())
    while largest - least > least >> CLOSE_BITS:
        limit = (least + largest) // 2
        fit = fitted(cost, num_bins, limit, takes_first=True)
        if fit is None:
            least = limit + 1
        else:
            found, largest = fit, int(sums_of_bins(cost, fit, num_bins).max())
    return found


# --- The table of built-in methods. A new one is a row here, and one in `METHODS` of `recipe/modules.py`, which says
# what a recipe may do with it. The method `none` keeps hash order and has no row.

Deal = Callable[[Int64Array, int], Int64Array]
"""Costs int64 [n] of items, and a number of bins -> the bin of each item, int64 [n]."""


class BalanceMethod(msgspec.Struct, frozen=True, kw_only=True):
    """How a built-in method places samples and items."""

    samples: Deal
    """Bins of equally many items."""
    items: Deal
    """Bins of any number of items."""
    samples_of_rank: Deal | None = None
    """How the samples of one rank come into microbatches at level `bin`; None: as `samples`."""
    whole: Callable[..., Placement] | None = None
    """Costs, Layout and keyword `microbatches` -> rank and microbatch at once, at level `both`; None: `samples` makes
    bins, and those of like cost come into the same microbatch of all ranks."""


def blocks(cost: Int64Array, num_bins: int) -> Int64Array:
    """Cut the items, costliest first, into bins of equally many; the first bin has the costliest ones."""
    bin_of_item = np.empty(len(cost), np.int64)
    bin_of_item[by_descending_cost(cost)] = np.arange(len(cost)) // (len(cost) // num_bins)
    return bin_of_item


BALANCE_METHODS: dict[str, BalanceMethod] = {
    "rows": BalanceMethod(samples=equal_counts, items=lpt_or_fit, samples_of_rank=blocks, whole=in_rows),
    "lpt": BalanceMethod(samples=equal_counts, items=lpt_or_fit),
    "karmarkar_karp": BalanceMethod(samples=partial(karmarkar_karp, has_equal_counts=True), items=karmarkar_karp),
    "zigzag": BalanceMethod(samples=zigzag, items=zigzag),
}
"""By the keys of the recipe's `METHODS`."""


# --- A method of the user's: `module:function` of the recipe.
#
# Every item has one bin that exists, counts and cap are kept, and the function answers alike when it is asked again;
# anything else is an error that names the function.

Function = Callable[..., Any]


@contextmanager
def errors_of(what: str, function: Function, step: int) -> Iterator[None]:
    """Whatever is raised inside of the `with` block is a PlanError that names the function and the step.

    Args:
        what: The kind of function and its name, as `the strategy module:function`.
        function: It, whose file the error points into.
        step: The step that it was asked about.

    Raises:
        PlanError: Anything was raised but KeyboardInterrupt.
    """
    try:
        yield
    except TorchmixError as error:
        raise PlanError(f"{what}, step {step}: {error}") from error
    except (Exception, SystemExit) as error:
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        inner = [frame for frame in frames if frame.filename == file] or frames
        place = f" at {inner[-1].filename}, line {inner[-1].lineno}" if inner else ""
        raise PlanError(
            f"{what}, step {step}: it raises {type(error).__name__}: {error}{place}; mend it there, or take it out of "
            f"the recipe. `torchmix plan RECIPE --steps {step + 1}` runs it without data"
        ) from error


class OwnMethod:
    """Calls the user's function, and checks what it says."""

    def __init__(self, name: str, where: str) -> None:
        """Import the function; errors as those of `imported`."""
        self._what = f"the method {name}"
        self._function = imported(name, where)
        self.step = 0
        """The step that it is asked about, for errors."""
        self._was_asked_twice = False

    def __call__(
        self,
        cost: Int64Array,
        memory: Int64Array,
        *,
        num_buckets: int,
        bins: int,
        items_per_bin: int | None,
        cap: int | None,
    ) -> Int64Array:
        """Bin of each item, in [0, num_buckets x bins); bucket k has bins k x bins to (k + 1) x bins - 1.

        Args:
            cost: int64 [n].
            memory: int64 [n] bytes of each item.
            num_buckets: Ranks, or other consumers.
            bins: Bins of a bucket.
            items_per_bin: Exactly so many items are in each bin; None: any number.
            cap: Most bytes of a bin; None: no bound.

        Raises:
            PlanError: The function breaks one of these rules, or does not answer alike twice.
        """
        options = {"num_buckets": num_buckets, "bins": bins, "items_per_bin": items_per_bin, "cap": cap}
        with errors_of(self._what, self._function, self.step):
            found = self._asked(cost, memory, options)
            if not self._was_asked_twice:
                self._was_asked_twice = True
                if not np.array_equal(found, self._asked(cost, memory, options)):
                    raise PlanError(
                        "it answers otherwise when it is asked again; it must depend on its arguments alone"
                    )
        return found

    def _asked(self, cost: Int64Array, memory: Int64Array, options: dict[str, int | None]) -> Int64Array:
        found = np.asarray(self._function(cost.copy(), memory.copy(), **options))
        num_bins = (options["num_buckets"] or 0) * (options["bins"] or 0)
        if found.shape != cost.shape or found.dtype.kind not in "iu":
            raise PlanError(
                f"it gives {found.dtype} {list(found.shape)}, not one whole number for each of {len(cost)} items"
            )
        found = found.astype(np.int64)
        if len(found) and not 0 <= found.min() <= found.max() < num_bins:
            item = int(np.argmax((found < 0) | (found >= num_bins)))
            raise PlanError(f"it puts item {item} into bin {found[item]}; there are bins 0 to {num_bins - 1}")
        count = np.bincount(found, minlength=num_bins)
        each = options["items_per_bin"]
        if each is not None and (count != each).any():
            number = int(np.argmax(count != each))
            raise PlanError(f"it puts {count[number]} items into bin {number}; each has {each}")
        cap = options["cap"]
        if cap is not None:
            held = np.zeros(num_bins, np.int64)
            np.add.at(held, found, memory)
            if held.max(initial=0) > cap:
                raise PlanError(f"it puts {held.max()} bytes into bin {int(held.argmax())}; the cap is {cap}")
        return found
