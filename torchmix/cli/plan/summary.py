"""Steps of a plan, summed into what a person asks of them.

In: `StepPlan`s of consecutive steps, each with the seconds that planning took. Out: per source tokens, share and
epochs; fill, balance, deferral and planning time over all. Must hold: memory does not grow with the number of steps,
without 8 bytes a step of planning times. Cost: microseconds per step.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.cli.terminal import count_text, percent_text, print_meanings, print_table
from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.planner.forecast.figures import ModuleSums
from torchmix.planner.plan import StepPlan

COLUMNS = {
    "source": "a source of the recipe, by its name",
    "share": "the share that is asked of it: the mean over these steps, each by the recipe that the run has then; 0 "
    "once it has run out",
    "given": "its share of the tokens in the samples of these steps",
    "tokens": "of it in these samples",
    "epochs": "how often it has been gone through since step 0, up to the last of these steps",
    "an epoch": "tokens that going through it once gives, after packing.overflow",
    "deferred": "tokens of it that were drawn and wait, after the last of these steps, for a later one",
}
LINES = {
    "fill": "tokens in samples over the tokens that the samples have room for; the rest is padding",
    "balance": "cost of the slowest rank, summed over the microbatches, over the least that any placement could reach, "
    "1 being perfect; hash order is the same for samples that are placed without a look at their cost",
    "deferred": "pieces that came in a later step than their document was drawn in, and by how many steps at most",
    "module": "the same of its items, by the costliest of its consumers",
    "traffic": "rows that a module computes in one replica and another one trains on; and the steps in which items "
    "could not stay near their text within near_text, or in which hash order was cheaper",
    "planning": "time to plan a step, without reading",
    "digest": "of the order from step 0 to this one: equal digests are equal orders",
}


class PlanSummary:
    """Sums over the steps added."""

    def __init__(self, epoch_tokens: Mapping[str, int], epochs: Mapping[str, float]) -> None:
        """Start at no steps.

        Args:
            epoch_tokens: Tokens that one epoch of each source gives, by name; all that the run has.
            epochs: How often each was gone through before the steps that are added or passed over; 0 where left out.
        """
        self._place = {name: s for s, name in enumerate(sorted(epoch_tokens))}
        self._epoch_tokens = np.array([epoch_tokens[name] for name in self._place], np.int64)
        self._epochs = np.array([epochs.get(name, 0.0) for name in self._place])
        count = len(self._place)
        self._asked, self._drawn, self._delivered, self._pool = (np.zeros(count, np.int64) for _ in range(4))
        self._drawn_before = np.zeros(count, np.int64)
        self._shares, self._shared_tokens = np.zeros(count), 0
        self._seconds = array("d")
        self._least_capacity = self._most_capacity = 0
        self._capacity = self._cost = self._lower_bound = self._hash_order_cost = 0
        self._lowest_fill, self._worst_ratio = (2.0, -1), (0.0, -1)  # beyond any step's
        self._num_pieces = self._late_pieces = self._oldest = 0
        self._hash_order = 0
        self._modules: dict[str, ModuleSums] = {}
        self._first_step = -1
        self._last: StepPlan | None = None

    def pass_over(self, plan: StepPlan) -> None:
        """Count a step before the first one asked for: only the position in each source's epochs."""
        self._drawn_before += self._by_name(plan, plan.drawn_tokens)

    def add(self, plan: StepPlan, shares: Int64Array, seconds: float) -> None:
        """Count a step; `shares` of `Planner.shares_asked`, `seconds` is how long it took to plan."""
        if self._last is None:
            self._first_step, self._least_capacity = plan.step, plan.capacity_tokens
        self._asked += self._by_name(plan, plan.asked_tokens)
        self._drawn += self._by_name(plan, plan.drawn_tokens)
        self._delivered += self._by_name(plan, plan.delivered_tokens)
        self._pool = self._by_name(plan, plan.pool_tokens)
        if shares.any():
            self._shares += self._by_name(plan, shares) / SHARE_ONE * plan.capacity_tokens
            self._shared_tokens += plan.capacity_tokens
        self._seconds.append(seconds)
        self._capacity += plan.capacity_tokens
        self._least_capacity = min(self._least_capacity, plan.capacity_tokens)
        self._most_capacity = max(self._most_capacity, plan.capacity_tokens)
        self._cost += plan.balance.cost
        self._lower_bound += plan.balance.lower_bound
        self._hash_order_cost += plan.balance.hash_order_cost
        self._lowest_fill = min(self._lowest_fill, (plan.fill, plan.step))
        if plan.balance.ratio > self._worst_ratio[0]:
            self._worst_ratio = (plan.balance.ratio, plan.step)
        ages = plan.step - plan.pieces.drawn_step
        self._num_pieces += len(ages)
        self._late_pieces += int(np.count_nonzero(ages))
        self._oldest = max(self._oldest, int(ages.max(initial=0)))
        self._hash_order += plan.balance.took_hash_order
        for name in plan.item_modules:
            self._modules.setdefault(name, ModuleSums()).add(plan, name)
        self._last = plan

    def _by_name(self, plan: StepPlan, tokens: Int64Array) -> Int64Array:
        """Tokens of a plan's streams in the order of the shares; an edited run has other streams from step to step."""
        found = np.zeros(len(self._place), np.int64)
        found[[self._place[name] for name in plan.streams]] = tokens
        return found

    def delivered(self) -> dict[str, int]:
        """Tokens that each source gave, by sorted name."""
        return dict(zip(self._place, map(int, self._delivered), strict=True))

    def shares(self) -> dict[str, float]:
        """The mean share that was asked of each source, by sorted name."""
        return dict(zip(self._place, (self._shares / max(1, self._shared_tokens)).tolist(), strict=True))

    def values(self) -> dict[str, Any]:
        """The summary for a program; tokens are of the steps added, epochs of all from step 0 on."""
        if self._last is None:
            return {"num_steps": 0, "sources": []}
        total = int(self._delivered.sum())
        epochs = self._epochs + (self._drawn_before + self._drawn) / np.maximum(self._epoch_tokens, 1)
        milliseconds = 1000 * np.array(self._seconds)
        return {
            "first_step": self._first_step,
            "num_steps": len(self._seconds),
            "least_capacity_tokens": self._least_capacity,
            "capacity_tokens": self._most_capacity,
            "sources": [
                {
                    "name": name,
                    "share": share,
                    "asked_tokens": int(self._asked[s]),
                    "drawn_tokens": int(self._drawn[s]),
                    "delivered_tokens": int(self._delivered[s]),
                    "delivered_share": int(self._delivered[s]) / max(total, 1),
                    "pool_tokens": int(self._pool[s]),
                    "epochs": float(epochs[s]),
                    "epoch_tokens": int(self._epoch_tokens[s]),
                }
                for s, (name, share) in enumerate(self.shares().items())
            ],
            "fill": total / self._capacity,
            "lowest_fill": self._lowest_fill[0],
            "lowest_fill_step": self._lowest_fill[1],
            "balance_ratio": self._cost / self._lower_bound,
            "worst_balance_ratio": self._worst_ratio[0],
            "worst_balance_step": self._worst_ratio[1],
            "hash_order_ratio": self._hash_order_cost / self._lower_bound,
            "steps_in_hash_order": self._hash_order,
            "modules": {name: sums.values() for name, sums in self._modules.items()},
            "late_pieces": self._late_pieces / max(self._num_pieces, 1),
            "oldest_piece_steps": self._oldest,
            "planning_ms": {
                "median": float(np.median(milliseconds)),
                "p95": float(np.quantile(milliseconds, 0.95)),
                "max": float(milliseconds.max()),
            },
            "order_digest": self._last.order_digest.hex(),
        }


def module_lines(modules: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`ModuleSums.values` of each module for a person: balance, traffic between replicas, and fall-backs."""
    lines = []
    for name, one in modules.items():
        consumers, steps = count_text(one["num_consumers"]), count_text(one["num_steps"])
        lines.append(
            f"module    {name}: {count_text(one['num_items'])} {one['items']}s on {consumers} consumers, "
            f"{one['balance_ratio']:.4f} x the lower bound; hash order {one['hash_order_ratio']:.4f}"
        )
        away, rows = one["rows_that_travel"], one["rows"]
        left, hashed = one["steps_left_text"], one["steps_in_hash_order"]
        fell_back = [f"left the text in {count_text(left)}"] * (left > 0)
        fell_back += [f"took hash order in {count_text(hashed)}"] * (hashed > 0)
        behind = f"; {' and '.join(fell_back)} of {steps} steps" if fell_back else ""
        lines.append(
            f"traffic   {name}: {count_text(away)} of {count_text(rows)} rows travel to another replica "
            f"({percent_text(away / max(rows, 1))}){behind}"
        )
    return lines


def print_summary(values: Mapping[str, Any], *, explain: bool = False) -> None:
    """Print `PlanSummary.values()` for a person."""
    if not values["num_steps"]:
        return
    rows = [
        (
            source["name"],
            percent_text(source["share"]),
            percent_text(source["delivered_share"]),
            count_text(source["delivered_tokens"]),
            f"{source['epochs']:,.4g}",
            count_text(source["epoch_tokens"]),
            count_text(source["pool_tokens"]),
        )
        for source in values["sources"]
        if source["epoch_tokens"]
    ]
    print_table(COLUMNS, rows, explain=explain)
    planning = values["planning_ms"]
    balance = "nothing to balance at dp 1; see --dp"
    if values.get("dp") != 1:
        balance = (
            f"{values['balance_ratio']:.4f} x the lower bound, worst {values['worst_balance_ratio']:.4f} "
            f"in step {values['worst_balance_step']}; hash order {values['hash_order_ratio']:.4f}"
        )
        if values["steps_in_hash_order"]:
            balance += f", taken in {count_text(values['steps_in_hash_order'])} steps where it was cheaper"
    capacity = count_text(values["capacity_tokens"])
    if values["least_capacity_tokens"] != values["capacity_tokens"]:
        capacity = f"{count_text(values['least_capacity_tokens'])} to {capacity}"
    of_modules = "".join(f"{line}\n" for line in module_lines(values["modules"]))
    print(f"""
fill      {percent_text(values["fill"])} of {capacity} tokens a step; \
lowest {percent_text(values["lowest_fill"])} in step {values["lowest_fill_step"]}
balance   {balance}
{of_modules}deferred  {percent_text(values["late_pieces"])} of the pieces came late, the latest by \
{values["oldest_piece_steps"]} step(s)
planning  {planning["median"]:.2f} ms a step (p95 {planning["p95"]:.2f}, longest {planning["max"]:.2f})
digest    {values["order_digest"]} after step {values["first_step"] + values["num_steps"] - 1}""")
    if explain:
        print_meanings(LINES)
