"""Items -> consumers: which rank computes which item of a module.

In: the items of a step, what they cost, and the placement of the backbone. Out: an `ItemPlan`. Must hold: every item is
placed once; the bytes of a consumer stay below the cap; the placement never costs more than hash order. Cost: that of
the method.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError
from torchmix.parallel.layout import Layout
from torchmix.planner.balance import BalanceReport, Placement
from torchmix.planner.cost import EncoderCost, encoder_cost
from torchmix.planner.items import Items
from torchmix.planner.methods.bins import lpt_within, sums_of_bins
from torchmix.planner.methods.lpt import lpt
from torchmix.planner.methods.near_home import lpt_near_home
from torchmix.planner.plan import ItemPlan
from torchmix.recipe.balance.structs import Module
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.shares import parse_fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemPlacer:
    """Places the items of one module."""

    name: str
    module: Module
    cost: EncoderCost

    @classmethod
    def of(cls, name: str, module: Module) -> ItemPlacer:
        """The placer of a module of a recipe."""
        return cls(name=name, module=module, cost=encoder_cost(module.model))

    def place(self, items: Items, samples: Placement, layout: Layout) -> ItemPlan:
        """Place the items of a step.

        Args:
            items: [n] of the module.
            samples: Where the backbone computes each sample.
            layout: Sizes of the job.

        Raises:
            PlanError: An item exceeds the cap, or all of them do, or costs exceed 64 bits.
        """
        module = self.module
        num_consumers = layout.dp * layout.consumers_of_replica(module.axis)
        num_bins = int(samples.microbatch_of_sample.max()) + 1 if module.scope == "microbatch" else 1
        bin_of_item = np.zeros(len(items), np.int64)
        if module.scope == "microbatch":
            bin_of_item = samples.microbatch_of_sample[items.sample]
        cost = self.cost.of_items(items.size)
        hashed = np.arange(len(items)) % num_consumers
        plain = _sum_of_slowest(cost, hashed, bin_of_item, num_consumers, num_bins)
        consumer = (
            hashed
            if module.method == "none"
            else self._shared_out(
                items, cost, bin_of_item, num_consumers, samples.dp_rank_of_sample[items.sample], layout.dp
            )
        )
        placed = _sum_of_slowest(cost, consumer, bin_of_item, num_consumers, num_bins)
        took_hash_order = placed > plain and self._fits(items, hashed, bin_of_item, num_consumers, num_bins)
        if took_hash_order:
            consumer, placed = hashed, plain
        if module.method == "none" and not self._fits(items, hashed, bin_of_item, num_consumers, num_bins):
            raise PlanError(
                f"module {self.name}: in hash order a consumer takes more than the cap of {module.cap}; write a "
                f"method that balances, such as lpt"
            )
        return ItemPlan(
            axis=module.axis,
            num_consumers=num_consumers,
            num_bins=num_bins,
            items=items,
            consumer_of_item=consumer,
            bin_of_item=bin_of_item,
            slot_of_item=_slots(consumer * num_bins + bin_of_item),
            cost_of_item=cost,
            balance=BalanceReport(
                cost=placed,
                hash_order_cost=plain,
                lower_bound=_lower_bound(cost, bin_of_item, num_consumers, num_bins),
                took_hash_order=took_hash_order,
            ),
        )

    def _shared_out(
        self,
        items: Items,
        cost: Int64Array,
        bin_of_item: Int64Array,
        num_consumers: int,
        home: Int64Array,
        num_homes: int,
    ) -> Int64Array:
        """Consumer of each item: each bin is shared out by itself; homes are the replicas that have the text."""
        consumer = np.zeros(len(items), np.int64)
        for number in np.unique(bin_of_item).tolist():
            mine = np.flatnonzero(bin_of_item == number)
            if self.module.near_text is None:
                consumer[mine] = lpt(cost[mine], num_consumers)
            else:
                part = float(parse_fraction(self.module.near_text, f"modules.{self.name}.near_text"))
                consumer[mine] = lpt_near_home(cost[mine], home[mine], num_consumers, num_homes, part=part)
            if self.module.cap is None:
                continue
            cap, memory = self._cap, self.cost.bytes_of_items(items.size[mine])
            if sums_of_bins(memory, consumer[mine], num_consumers).max() > cap:
                try:
                    consumer[mine] = lpt_within(cost[mine], memory, num_consumers, cap)
                except PlanError as error:
                    raise PlanError(
                        f"module {self.name}: {error} (the numbers are those of the step's items)"
                    ) from None
        return consumer

    @property
    def _cap(self) -> int:
        return parse_bytes(self.module.cap, where=f"modules.{self.name}.cap") if self.module.cap is not None else 0

    def _fits(
        self, items: Items, consumer: Int64Array, bin_of_item: Int64Array, num_consumers: int, num_bins: int
    ) -> bool:
        if self.module.cap is None:
            return True
        memory = self.cost.bytes_of_items(items.size)
        return bool(
            sums_of_bins(memory, consumer * num_bins + bin_of_item, num_consumers * num_bins).max() <= self._cap
        )


def _sum_of_slowest(
    cost: Int64Array, consumer: Int64Array, bin_of_item: Int64Array, num_consumers: int, num_bins: int
) -> int:
    """Sum over bins of the costliest consumer."""
    sums = sums_of_bins(cost, bin_of_item * num_consumers + consumer, num_bins * num_consumers)
    return int(sums.reshape(num_bins, num_consumers).max(axis=1).sum())


def _lower_bound(cost: Int64Array, bin_of_item: Int64Array, num_consumers: int, num_bins: int) -> int:
    """No placement costs less: each bin costs its mean, and its costliest item, at least."""
    largest = np.zeros(num_bins, np.int64)
    np.maximum.at(largest, bin_of_item, cost)
    mean = -(-sums_of_bins(cost, bin_of_item, num_bins) // num_consumers)
    return max(1, int(np.maximum(mean, largest).sum()))


def _slots(place: Int64Array) -> Int64Array:
    """Index of each item among those of one place, in ascending order of items."""
    order = np.argsort(place, kind="stable")
    ordered = place[order]
    slot = np.empty(len(place), np.int64)
    slot[order] = np.arange(len(place)) - np.searchsorted(ordered, ordered)
    return slot
