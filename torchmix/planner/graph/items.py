"""Items -> consumers: which rank computes which item of a module.

Every item is placed once; the bytes of a consumer stay below the cap; the placement never costs more than hash order,
or, near the text, than the tolerance allows.
"""

from __future__ import annotations

from fractions import Fraction

import msgspec
import numpy as np
from msgspec.structs import replace

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError
from torchmix.parallel.place_tree import GridAxis, Layout
from torchmix.planner.balance import BalanceReport, Placement
from torchmix.planner.methods import (
    BALANCE_METHODS,
    OwnMethod,
    deal_to_groups,
    groups_of_bins,
    least_of_bins,
    lpt_or_fit,
    lpt_within,
    near_home,
    objective_of,
    sums_of_bins,
)
from torchmix.planner.plan import ItemPlan, Items


class ItemBalance(msgspec.Struct, frozen=True, kw_only=True):
    """How the items of a module are shared out."""

    axis: GridAxis
    method: str | OwnMethod = "lpt"
    """A key of `BALANCE_METHODS`, `none`, or the user's."""
    scope: str = "step"
    objective: str = "rows"
    cap: int | None = None
    """Most bytes of a consumer at a time."""
    group_size: int | None = None
    """Consumers of a group; None: all are one."""
    near_text: float | Fraction | None = None
    """How much costlier than lpt the costliest consumer may be so that items stay with their text, 0.05 for 5 %."""
    name: str = ""
    """The module's name, for errors."""


def place_items(
    items: Items,
    cost: Int64Array,
    memory: Int64Array,
    samples: Placement,
    layout: Layout,
    options: ItemBalance,
    *,
    unit: str,
) -> ItemPlan:
    """Place the items of a step.

    Args:
        items: [n] of the module.
        cost: int64 [n].
        memory: int64 [n] bytes of each item; zeros where no cap is given.
        samples: Where the backbone computes each sample.
        layout: Sizes of the job.
        options: How.
        unit: What an item is.

    Raises:
        PlanError: An item exceeds the cap, or all of them do; rows would travel inside a pipeline's schedule.
    """
    if options.scope == "microbatch" and layout.pp > 1:
        raise PlanError(f"items of microbatches need one pipeline stage, the job has {layout.pp}; write scope: step")
    num_consumers = layout.dp * layout.consumers_of_replica(options.axis)
    num_bins = int(samples.microbatch_of_sample.max()) + 1 if options.scope == "microbatch" else 1
    bin_of_item = np.zeros(len(items), np.int64)
    if options.scope == "microbatch":
        bin_of_item = samples.microbatch_of_sample[items.sample]
    hashed = np.arange(len(items)) % num_consumers
    options = replace(options, name=options.name or unit)
    consumer = hashed if options.method == "none" else np.zeros(len(items), np.int64)
    num_near = num_others = 0
    for number in np.unique(bin_of_item).tolist() if options.method != "none" else ():
        mine = np.flatnonzero(bin_of_item == number)
        home = samples.dp_rank_of_sample[items.sample[mine]]
        near = _near_text(cost[mine], memory[mine], num_consumers, options, home, layout.dp)
        num_near += near is not None
        num_others += near is None
        consumer[mine] = _shared_out(cost[mine], memory[mine], num_consumers, options) if near is None else near
    costs = [_judged(cost, each, bin_of_item, num_consumers, num_bins, options) for each in (consumer, hashed)]
    hash_fits = _most_bytes(memory, hashed, bin_of_item, num_consumers, num_bins) <= (options.cap or 1 << 62)
    if options.method == "none" and not hash_fits:
        raise PlanError(
            f"module {options.name}: in hash order a consumer takes more than the cap of {options.cap} bytes; "
            f"write a method that balances, such as lpt"
        )
    # What is near its text may cost more than hash order: its tolerance is what is paid for less traffic.
    took_hash_order = costs[0] > costs[1] and hash_fits and not num_near
    if took_hash_order:
        consumer, costs = hashed, [costs[1], costs[1]]
    return ItemPlan(
        unit=unit,
        axis=options.axis,
        num_consumers=num_consumers,
        num_bins=num_bins,
        items=items,
        consumer_of_item=consumer,
        bin_of_item=bin_of_item,
        slot_of_item=slots_of(consumer * num_bins + bin_of_item),
        cost_of_item=cost,
        balance=BalanceReport(
            cost=costs[0],
            hash_order_cost=costs[1],
            lower_bound=_lower_bound(cost, bin_of_item, num_consumers, num_bins, options.objective),
            took_hash_order=took_hash_order,
            left_text=options.near_text is not None and num_others > 0,
        ),
    )


def slots_of(place: Int64Array) -> Int64Array:
    """Index of each item among those of one place, in ascending order of items."""
    order = np.argsort(place, kind="stable")
    ordered = place[order]
    slot = np.empty(len(place), np.int64)
    slot[order] = np.arange(len(place)) - np.searchsorted(ordered, ordered)
    return slot


def _near_text(
    cost: Int64Array, memory: Int64Array, num_bins: int, options: ItemBalance, home: Int64Array, num_homes: int
) -> Int64Array | None:
    """Consumer of each item of one bin, near its text; homes are the replicas that have it. None: not asked for, or not
    within tolerance and cap."""
    if options.near_text is None:
        return None
    largest = int(sums_of_bins(cost, lpt_or_fit(cost, num_bins), num_bins).max())
    limit = min(largest + int(largest * Fraction(options.near_text)), int(cost.sum()))  # what all cost limits nothing
    for near in near_home(cost, home, num_bins, num_homes, limit):
        if options.cap is None or sums_of_bins(memory, near, num_bins).max() <= options.cap:
            return near
    return None


def _shared_out(cost: Int64Array, memory: Int64Array, num_bins: int, options: ItemBalance) -> Int64Array:
    """Consumer of each item of one bin."""
    group_size = options.group_size
    if group_size is None or group_size >= num_bins:
        return _in_group(cost, memory, num_bins, options)
    group_of_bin = groups_of_bins(num_bins, group_size)
    group = deal_to_groups(cost, group_of_bin)
    found = np.empty(len(cost), np.int64)
    for number in range(int(group_of_bin.max()) + 1):
        mine, bins = np.flatnonzero(group == number), np.flatnonzero(group_of_bin == number)
        found[mine] = bins[_in_group(cost[mine], memory[mine], len(bins), options)]
    return found


def _in_group(cost: Int64Array, memory: Int64Array, num_bins: int, options: ItemBalance) -> Int64Array:
    method, cap = options.method, options.cap
    if isinstance(method, OwnMethod):
        return method(cost, memory, num_buckets=num_bins, bins=1, items_per_bin=None, cap=cap)
    found = BALANCE_METHODS[method].items(cost, num_bins)
    if cap is not None and sums_of_bins(memory, found, num_bins).max() > cap:
        try:
            return lpt_within(cost, memory, num_bins, cap)
        except PlanError as error:
            name = options.name
            raise PlanError(
                f"module {name}: {error}. Raise modules.{name}.cap, or leave it out, or train on more ranks"
            ) from None
    return found


def _judged(
    cost: Int64Array,
    consumer: Int64Array,
    bin_of_item: Int64Array,
    num_consumers: int,
    num_bins: int,
    options: ItemBalance,
) -> int:
    sums = sums_of_bins(cost, consumer * num_bins + bin_of_item, num_consumers * num_bins)
    return objective_of(sums.reshape(num_consumers, num_bins), options.objective)


def _most_bytes(
    memory: Int64Array, consumer: Int64Array, bin_of_item: Int64Array, num_consumers: int, num_bins: int
) -> int:
    return int(sums_of_bins(memory, consumer * num_bins + bin_of_item, num_consumers * num_bins).max())


def _lower_bound(cost: Int64Array, bin_of_item: Int64Array, num_consumers: int, num_bins: int, objective: str) -> int:
    """No placement costs less, since the bin of each item is given."""
    if objective == "rank":
        return max(1, least_of_bins(cost, num_consumers))
    least = [least_of_bins(cost[bin_of_item == number], num_consumers) for number in range(num_bins)]
    return max(1, max(least) if objective == "max" else sum(least))
