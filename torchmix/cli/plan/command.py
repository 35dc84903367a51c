"""`torchmix plan`: the steps of a run before it runs."""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.cli.plan.loaders import add_loaders, show_loaders
from torchmix.cli.plan.report import ReportNumbers, check_charts, write_report
from torchmix.cli.plan.simulate import (
    DEFAULT_STEPS,
    add_simulate,
    print_simulation,
    simulated_part,
    simulation_of,
    simulation_values,
)
from torchmix.cli.run import add_decisions, add_layout, add_state, layout_of_arguments, open_recipe, run_fold, state_of
from torchmix.cli.second_interpreter import difference_elsewhere
from torchmix.cli.streams import group_values, print_groups
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    add_part,
    add_recipe,
    at_least,
    check_folder,
    count_text,
    percent_text,
    print_json,
    print_meanings,
    print_table,
    progress_bar,
)
from torchmix.errors import OptionError, PlanError, SourceExhausted
from torchmix.mixture.shares import SHARE_ONE
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.planner.contexts import ContextPlan, check_runs, run_costs
from torchmix.planner.forecast import ModuleSums
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.planner.stream_order import epoch_tokens
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import length_of_step, most_length, samples_of_step, stages_of
from torchmix.steps.history import RunFold
from torchmix.steps.replay import check_plan_folder, paths_of, write_plan_files
from torchmix.steps.state import LoaderState

# --- `torchmix plan --tree`: who reads in a job, and who is served.
#
# It is the tree that `build_loader` makes of the same sizes. Cost: O(ranks); neither the catalog nor data are opened.

MOST_REPLICAS = 4
"""That are printed; the others have the same form."""


def add_tree(parser: argparse.ArgumentParser) -> None:
    """Declare --tree and what it needs beside the sizes of a job."""
    parser.add_argument("--tree", action="store_true", help="show which ranks read and whom they serve, and no steps")
    parser.add_argument("--leaders", choices=("replica", "node", "stage"), help="for --tree: which ranks read")
    parser.add_argument("--ranks-per-node", type=at_least(1), metavar="N", help="for --tree: ranks of every node")


def tree_of(arguments: argparse.Namespace, part: Part) -> ClientPlaceTree:
    """The tree of the job that the arguments describe.

    Raises:
        TopologyError: The sizes do not fit each other, the nodes, or a global batch.
    """
    layout = layout_of_arguments(arguments, part)
    if part.balance.context is not None:
        check_runs(run_costs(part.balance.context, backbone_cost(part), layout), part.batch)
    else:
        for stage in stages_of(part.batch):
            layout.num_microbatches(stage.samples)
    topology = Topology(tp=arguments.tp, cp=arguments.cp, pp=arguments.pp, dp=layout.dp)
    return ClientPlaceTree.from_topology(
        topology, leaders=arguments.leaders or "replica", ranks_per_node=arguments.ranks_per_node or topology.world_size
    )


def tree_values(tree: ClientPlaceTree) -> dict[str, Any]:
    """The tree as values for --json; every list is by global rank."""
    sizes = tree.topology
    return {
        **{axis: getattr(sizes, axis) for axis in ("tp", "cp", "pp", "dp")},
        "leaders": list(tree.leaders),
        "leader_of_rank": list(tree.leader_of_rank),
        "replica_of_rank": list(tree.replica_of_rank),
        "stage_of_rank": [role.stage for role in tree.role_of_rank],
        "cp_rank_of_rank": [role.cp_rank for role in tree.role_of_rank],
    }


def tree_lines(tree: ClientPlaceTree) -> list[str]:
    """The tree as text: a line for each place of a replica, slice and stage, with its ranks; leaders have a star."""
    sizes = tree.topology
    served = Counter(tree.leader_of_rank)
    lines = [
        f"{count_text(sizes.world_size)} ranks: dp {sizes.dp} x cp {sizes.cp} x pp {sizes.pp} x tp {sizes.tp}; "
        f"{count_text(len(tree.leaders))} of them read, each for {_range_text(list(served.values()))} ranks"
    ]
    ranks_of_place: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(sizes.world_size):
        at = sizes.coordinates_of(rank)
        ranks_of_place.setdefault((at.dp, at.cp, at.pp), []).append(rank)
    above: tuple[int, ...] = ()
    for place in sorted(ranks_of_place):
        dp, cp, pp = place
        if dp == MOST_REPLICAS:
            lines.append(f"... and {count_text(sizes.dp - dp)} more replicas")
            break
        if place[:1] != above[:1]:
            lines.append(f"dp {dp}")
        if place[:2] != above[:2]:
            lines.append(f"  cp {cp}")
        above = place
        ranks = ranks_of_place[place]
        leaders = sorted({tree.leader_of_rank[rank] for rank in ranks})
        stars = " ".join(f"{rank}*" if rank in tree.leaders else str(rank) for rank in ranks)
        stage = tree.role_of_rank[ranks[0]].stage
        name = "only" if stage == "only" else f"{pp} ({stage})"
        lines.append(f"    pp {name}  ranks {stars}  read by {' '.join(map(str, leaders))}")
    return lines


def _range_text(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


# --- Steps of a plan, summed into what a person asks of them.
#
# Memory does not grow with the number of steps, without 8 bytes a step of planning times. Cost: microseconds per step.

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
    "runs": "with packing.method: whole, bins of so many ranks; tokens that are padding; and what the slowest rank of "
    "each microbatch computes over the mean of all ranks",
    "rows": "how many microbatches steps have, which follows from their documents",
    "module": "the same of its items, by the costliest of its consumers",
    "traffic": "rows that a module computes in one replica and another one trains on; and the steps in which items "
    "could not stay near their text within near_text, or in which hash order was cheaper",
    "planning": "time to plan a step, without reading",
    "digest": "of the order from step 0 to this one: equal digests are equal orders",
}


class ContextSums:
    """Sums over the runs of ranks of the steps added."""

    def __init__(self) -> None:
        """Start at no steps."""
        self._bins: dict[int, int] = {}
        self._microbatches: list[int] = []
        self._tokens = self._padded = self._slowest = self._mean = self._empty = 0
        self._last: list[list[int]] = []
        """The ranks of each run that has a document, by microbatch of the last step."""

    def add(self, contexts: ContextPlan, tokens: int) -> None:
        """Count a step of so many tokens."""
        used = contexts.tokens_of_bin > 0
        stops = np.searchsorted(contexts.microbatch_of_bin[used], np.arange(1, contexts.num_microbatches))
        self._last = [sizes.tolist() for sizes in np.split(contexts.size_of_bin[used], stops)]
        for size, count in zip(*np.unique(contexts.size_of_bin, return_counts=True), strict=True):
            self._bins[int(size)] = self._bins.get(int(size), 0) + int(count)
        loads = contexts.load_of_bin * contexts.size_of_bin
        num_ranks = int(contexts.size_of_bin[contexts.microbatch_of_bin == 0].sum())
        self._microbatches.append(contexts.num_microbatches)
        self._tokens += int(tokens)
        self._padded += int(contexts.tokens_of_bin.sum())
        self._empty += int(np.count_nonzero(contexts.tokens_of_bin == 0))
        self._slowest += int(contexts.load_of_ranks(num_ranks).max(axis=1).sum()) * num_ranks
        self._mean += int(loads.sum())

    def values(self) -> dict[str, Any] | None:
        """The sums for a program; None where no step has runs of ranks."""
        if not self._microbatches:
            return None
        return {
            "bins_by_ranks": {str(size): count for size, count in sorted(self._bins.items())},
            "microbatches": {
                "least": min(self._microbatches),
                "mean": sum(self._microbatches) / len(self._microbatches),
                "most": max(self._microbatches),
            },
            "padding": 1 - self._tokens / self._padded,
            "slowest_over_mean": self._slowest / self._mean,
            "empty_bins": self._empty,
            "sizes_of_last_step": self._last,
        }


def context_lines(values: Mapping[str, Any] | None) -> list[str]:
    """`ContextSums.values` for a person."""
    if values is None:
        return []
    sizes = ", ".join(f"{count_text(count)} of {size}" for size, count in values["bins_by_ranks"].items())
    counts = values["microbatches"]
    empty = f", {count_text(values['empty_bins'])} of them empty" if values["empty_bins"] else ""
    return [
        f"runs      {sizes} rank(s){empty}; {percent_text(values['padding'])} padding; the slowest rank has "
        f"{values['slowest_over_mean']:.4f} x the mean",
        f"rows      {counts['mean']:.1f} microbatches a step, {counts['least']} to {counts['most']}",
        f"sizes     {sizes_text(values['sizes_of_last_step'])}",
    ]


MOST_ROWS = 6
"""Microbatches of which a line says the sizes of runs."""


def sizes_text(rows: Sequence[Sequence[int]]) -> str:
    """The sizes of runs in the microbatches of a step, as `2 x 4 + 8 x 1` for two of four ranks and eight of one; equal
    neighbours are one."""
    found: list[tuple[str, int]] = []
    for row in rows:
        sizes, counts = np.unique(np.array(row, np.int64), return_counts=True)
        pairs = zip(counts[::-1].tolist(), sizes[::-1].tolist(), strict=True)
        text = " + ".join(f"{count} x {size}" for count, size in pairs) or "none"
        if found and found[-1][0] == text:
            found[-1] = text, found[-1][1] + 1
        else:
            found.append((text, 1))
    texts = [text if count == 1 else f"{text} ({count} times)" for text, count in found]
    more = f"; and {count_text(len(texts) - MOST_ROWS)} more" if len(texts) > MOST_ROWS else ""
    return f"{'; '.join(texts[:MOST_ROWS])}{more}, by microbatch of the last step"


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
        self._contexts = ContextSums()
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
        if plan.contexts is not None:
            self._contexts.add(plan.contexts, plan.delivered_tokens.sum())
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
            "contexts": self._contexts.values(),
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
    if values.get("dp") != 1 or values["contexts"]:
        balance = (
            f"{values['balance_ratio']:.4f} x the lower bound, worst {values['worst_balance_ratio']:.4f} "
            f"in step {values['worst_balance_step']}; hash order {values['hash_order_ratio']:.4f}"
        )
        if values["steps_in_hash_order"]:
            balance += f", taken in {count_text(values['steps_in_hash_order'])} steps where it was cheaper"
    capacity = count_text(values["capacity_tokens"])
    if values["least_capacity_tokens"] != values["capacity_tokens"]:
        capacity = f"{count_text(values['least_capacity_tokens'])} to {capacity}"
    more = [*context_lines(values["contexts"]), *module_lines(values["modules"])]
    of_modules = "".join(f"{line}\n" for line in more)
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


# --- `torchmix plan`: the steps of a run before it runs.
#
# What is shown is what a training run gets, since the same planner makes it. Cost: planning of all steps from 0 on,
# since the order is a fold; no data is read.

HELP = "show what the steps of a run will hold"

OF_STEPS = ("state", "accept_edit", "decisions", "out", "report", "simulate")
"""Options of planned steps, of which --tree and --loaders have none."""
OF_VIEW = {"tree": ("leaders", "ranks_per_node"), "loaders": ("processes", "nodes", "cpu", "memory")}
"""Options of --tree and --loaders, which decide nothing elsewhere."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="number of steps to plan")
    add_part(parser)
    parser.add_argument("--one-pass", action="store_true", help="every document once; --steps may then be left out")
    parser.add_argument("--start", type=at_least(0), metavar="S", help="first step (default 0, or the state's)")
    add_layout(parser)
    add_state(parser, "plan the steps of its run from there on")
    add_decisions(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the plan here, as Parquet, to look at or to replay"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write a page here: heat maps, lengths, mixture, predicted times"
    )
    add_tree(parser)
    add_loaders(parser)
    add_simulate(parser)
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Plan, and print or write the steps.

    Raises:
        OptionError: An option would do nothing.
        TorchmixError: Whatever keeps a step from being planned; nothing is written then.
    """
    one_pass = arguments.one_pass
    _check_options(arguments)
    if arguments.tree:
        return _show_tree(arguments)
    if arguments.loaders:
        return show_loaders(arguments)
    if arguments.report is not None:
        check_charts()
        check_folder("--report", arguments.report)
    if arguments.out is not None:
        check_plan_folder(arguments.out)
    if arguments.steps is None and arguments.simulate:
        arguments.steps = DEFAULT_STEPS
    if arguments.steps is None and not one_pass:
        raise OptionError("give --steps N, or --one-pass; --tree, --loaders and --simulate need neither")
    _, directory, part, catalog = open_recipe(
        arguments.recipe, arguments.part, one_pass=one_pass, alter=partial(simulated_part, arguments)
    )
    layout = layout_of_arguments(arguments, part)
    simulation = simulation_of(part, layout, with_megatron=arguments.megatron) if arguments.simulate else None
    state = state_of(arguments, part, catalog)
    start = _start(arguments, state)
    fold = run_fold(arguments, part, catalog, directory=directory, layout=layout, state=state, first=start)
    planners = fold.planners()
    summary = PlanSummary(_epoch_tokens(planners), fold.planner.epochs_before(fold.cursor.position))
    runs = None if part.balance.context is None else run_costs(part.balance.context, backbone_cost(part), layout)
    numbers = ReportNumbers(backbone_cost(part), most_length(part.batch), runs) if arguments.report else None
    stop = sys.maxsize if arguments.steps is None else start + arguments.steps
    has_ended, last_step = False, None
    with ExitStack() as stack:
        total = 0 if arguments.steps is None else stop
        bar = stack.enter_context(
            progress_bar(total, unit="step", title="planning", silent=arguments.json or arguments.quiet)
        )
        files = None
        if arguments.out is not None:
            _check_one_recipe(fold, start, stop)
            files = stack.enter_context(write_plan_files(arguments.out, planners[-1], catalog.fingerprint))
        for step in range(fold.cursor.step, stop):
            began = time.perf_counter()
            try:
                before, plan = fold.before(), fold.plan()
            except PlanError as error:  # what there is before it is still worth a look
                if has_ended := one_pass and step > start and isinstance(error, SourceExhausted):
                    break
                bar.close()
                if not arguments.json:
                    print_summary({"dp": layout.dp, **summary.values()})
                raise
            if step < start:
                summary.pass_over(plan)
            else:
                seconds = time.perf_counter() - began
                summary.add(plan, fold.planner.shares_asked(before, fold.cursor), seconds)
                if simulation is not None:
                    simulation.add(plan)
                if numbers is not None:
                    numbers.add(plan)
                if files is not None:
                    files.add(plan, before, fold.cursor)
                last_step = before, plan
            bar.update()
        differs = None
        if last_step is not None and fold.planner.part == part:  # else a recipe of before has planned it
            differs = difference_elsewhere(part, catalog, layout, last_step[0].order_digest, last_step[1])
        if state is not None:
            fold.skip_to(state.step)  # whose digest tells whether these are the steps of its run
    values = {
        "recipe": str(arguments.recipe),
        "recipe_fingerprint": recipe_fingerprint(part),
        "catalog_fingerprint": catalog.fingerprint,
        "part": arguments.part,
        "has_ended": has_ended,
        "edits": list(fold.edits),
        **asdict(layout),
        **summary.values(),
        "findings": [] if differs is None else [{"where": differs[0], "message": differs[1]}],
        "groups": group_values(part, summary.shares(), summary.delivered()),
        "files": [str(path) for path in paths_of(arguments.out)] if arguments.out is not None else [],
    }
    if simulation is not None:
        values["simulation"] = simulation_values(simulation, part, layout, arguments)
    if numbers is not None:
        write_report(arguments.report, values, numbers)
    if arguments.json:
        print_json(values)
        return ExitCode.OK if differs is None else ExitCode.FINDINGS
    of_part = arguments.recipe if arguments.part == "train" else f"{arguments.part} of {arguments.recipe}"
    last = values["first_step"] + values["num_steps"] - 1
    samples, lengths = (
        _range_text([of_step(part.batch, step) for step in (*range(start, last), last)])
        for of_step in (samples_of_step, length_of_step)
    )
    print(
        f"steps {start} to {last} of {of_part}: {samples} samples x {lengths} tokens, "
        f"dp {layout.dp}, micro-batch size {layout.micro_batch_size}\n"
    )
    print_summary(values, explain=arguments.explain)
    print_groups(values["groups"], explain=arguments.explain)
    if simulation is not None:
        print_simulation(values["simulation"], explain=arguments.explain)
    if fold.edits:
        print(f"\nedited at step {', '.join(map(str, fold.edits))}: each step is of the recipe that the run had then")
    if has_ended:
        print(f"\none pass: after step {last} every document has been given once")
    if arguments.out is not None:
        print(f"\nwrote {', '.join(path.name for path in paths_of(arguments.out))} to {arguments.out}")
    if arguments.report is not None:
        print(f"\nwrote {arguments.report}")
    if differs is not None:
        print(f"\nfinding: {differs[0]}: {differs[1]}")
    return ExitCode.OK if differs is None else ExitCode.FINDINGS


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that would silently do nothing."""
    views = [name for name in ("tree", "loaders") if getattr(arguments, name)]
    if len(views) == 2:
        raise OptionError("--tree and --loaders show different things; give one of them")
    given = [name for name in OF_STEPS if getattr(arguments, name) not in (None, False)]
    if views and given:
        option = f"--{given[0].replace('_', '-')}"
        raise OptionError(f"--{views[0]} plans no steps, so {option} would do nothing; leave one of them out")
    for view, names in OF_VIEW.items():
        given = [name for name in names if getattr(arguments, name) is not None]
        if given and view not in views:
            raise OptionError(f"--{given[0].replace('_', '-')} goes with --{view}, and would do nothing here")


def _show_tree(arguments: argparse.Namespace) -> ExitCode:
    part = part_of(load_recipe(arguments.recipe), arguments.part, one_pass=arguments.one_pass)
    tree = tree_of(arguments, part)
    if arguments.json:
        print_json({"recipe": str(arguments.recipe), **tree_values(tree)})
    else:
        print("\n".join(tree_lines(tree)))
    return ExitCode.OK


def _start(arguments: argparse.Namespace, state: LoaderState | None) -> int:
    """The first step to show."""
    if arguments.start is None:
        return 0 if state is None else state.step
    return int(arguments.start)


def _check_one_recipe(fold: RunFold, start: int, stop: int) -> None:
    """Refuse files of steps that several recipes have made: they could not be replayed."""
    inside = [step for step in fold.edits if start < step < stop]
    if inside or any(stop <= step for step in fold.edits):
        raise OptionError(
            f"--out: the run was edited at step {', '.join(map(str, inside or fold.edits))}, and a plan's files are "
            f"of one recipe; give --start {fold.edits[-1]}, or plan earlier steps with the recipe that the run had then"
        )


def _epoch_tokens(planners: Sequence[Planner]) -> dict[str, int]:
    """Tokens of an epoch of each source, as it was last."""
    return {
        name: epoch_tokens(order, one.sizes, one.denied)
        for one in planners
        for name, order in zip(one.streams, one.orders, strict=True)
    }
