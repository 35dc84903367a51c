"""Pieces -> bins of runs of ranks: how many ranks share a document, and which documents share ranks.

In each microbatch the DP x CP ranks fall into aligned runs. A run has one bin, and each of its ranks computes an equal
part of every document in it. The schedule makes the sum over microbatches of the costliest rank small. All numbers are
integers, so every leader plans the same. Cost: about 1 ms a step or less at 16 and 64 ranks with 85 to 6,000 pieces, 3
to 11 ms at 1,024 ranks with 7,600 to 96,000; by the Python beside the native call 10 to 140 ms, and 0.3 to 1.1 s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError, RecipeError, TopologyError
from torchmix.native.calls import Contexts
from torchmix.native.load import array_of, is_native, run
from torchmix.parallel.place_tree import Layout, powers_up_to
from torchmix.planner.balance import BalanceReport, CostModel, small_at_both_ends
from torchmix.planner.methods import sums_of_bins
from torchmix.recipe.ramp import most_length, most_tokens
from torchmix.recipe.structs import Balance, Batch, Context

# --- What a piece costs in a run of ranks.


class RunCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs and room of the runs of a layout."""

    per_token: int
    """Cost of each token, padding included, shared by the ranks of a run."""
    per_pair: int
    """Cost of the square of a piece's tokens, likewise."""
    per_exchanged: int
    """Cost of each token that a rank gets from another rank of its run."""
    per_microbatch: int
    """Cost of each microbatch, whatever it holds."""
    rank_tokens: int
    """Most tokens of a rank in a microbatch, padding included."""
    align: int
    """A rank has a multiple of this many tokens of each half of a piece's slice."""
    sizes: tuple[int, ...]
    """Ranks of a run, ascending; each divides the next, but the last may be all ranks."""
    num_ranks: int
    """P, data-parallel times context-parallel ranks."""
    stages: int = 1
    """Stages of the pipeline."""
    microbatches_of: int = 1
    """A step has a multiple of so many microbatches."""

    def padded(self, tokens: Int64Array, size: int) -> Int64Array:
        """Tokens of pieces in runs of so many ranks: each rank takes two equal chunks, one rank alone takes all."""
        multiple = self.align * (2 * size if size > 1 else 1)
        return -(-tokens // multiple) * multiple

    def of_rank(self, tokens: Int64Array, size: int) -> Int64Array:
        """What each rank of a run pays for pieces."""
        padded = self.padded(tokens, size)
        work = self.per_token * padded + self.per_pair * tokens * tokens
        exchanged = padded // size * (size - 1)
        return -(-work // size) + self.per_exchanged * exchanged

    def holds(self, tokens: int, size: int) -> bool:
        """Whether a run of so many ranks holds a sample."""
        return bool(self.padded(np.array([tokens]), size)[0] <= self.rank_tokens * size)


def sizes_of_layout(sizes: tuple[int, ...] | None, num_ranks: int) -> tuple[int, ...]:
    """The sizes of runs that a layout has; `sizes` are the recipe's.

    Raises:
        TopologyError: No size fits, or runs of the least one do not divide the ranks.
    """
    if sizes is None:
        return powers_up_to(num_ranks)
    found = tuple(size for size in sizes if size <= num_ranks)
    if not found or num_ranks % found[0]:
        raise TopologyError(
            f"balance.context.sizes {list(sizes)}: runs of {found[0] if found else sizes[0]} ranks do not divide the "
            f"{num_ranks} ranks of dp x cp; choose sizes of which the least does, or remove the key"
        )
    return found


def least_layout(balance: Balance, batch: Batch) -> Layout:
    """A layout that any step of a recipe fits, for those who only ask what is in its steps."""
    context = balance.context
    if context is None:
        return Layout()
    if context.sizes is not None:
        return Layout(cp=context.sizes[-1])
    ranks, multiple = 1, context.align
    while -(-most_length(batch) // multiple) * multiple > context.rank_tokens * ranks:
        ranks *= 2
        multiple = 2 * context.align * ranks
    return Layout(cp=ranks)


def run_costs(context: Context, cost: CostModel, layout: Layout) -> RunCosts:
    """The costs of a recipe's runs in a layout; errors as those of `sizes_of_layout`, and of several samples a bin."""
    if layout.micro_batch_size != 1:
        raise TopologyError(
            f"micro_batch_size {layout.micro_batch_size}: with packing.method: whole a microbatch is a bin of any "
            f"number of documents; use micro_batch_size 1"
        )
    num_ranks = layout.dp * layout.cp
    return RunCosts(
        per_token=cost.per_token,
        per_pair=cost.per_pair,
        per_exchanged=exchange_of(cost) if context.per_exchanged is None else context.per_exchanged,
        per_microbatch=context.per_microbatch,
        rank_tokens=context.rank_tokens,
        align=context.align,
        sizes=sizes_of_layout(context.sizes, num_ranks),
        num_ranks=num_ranks,
        stages=layout.pp,
        microbatches_of=context.microbatches_of,
    )


DEFAULT_EXCHANGE = 128


def exchange_of(cost: CostModel) -> int:
    """Cost of an exchanged token where the recipe does not say: this part of a computed one, so that of runs that would
    be equal the short ones are taken. It is a convention; `torchmix calibrate` fits it to timings."""
    return -(-cost.per_token // DEFAULT_EXCHANGE)


def check_runs(costs: RunCosts, batch: Batch) -> None:
    """Refuse a layout whose ranks cannot hold the longest document, and costs of which those of a step are too large.

    Raises:
        TopologyError: A document of `length` tokens fits no run.
        RecipeError: The cost of a batch would exceed 62 bits.
    """
    length, widest = most_length(batch), costs.sizes[-1]
    needed = int(costs.padded(np.array([length], np.int64), widest)[0])
    if needed > costs.rank_tokens * widest:
        raise TopologyError(
            f"a document of {length} tokens does not fit the longest run of this job, {widest} of its "
            f"{costs.num_ranks} ranks of dp x cp with balance.context.rank_tokens {costs.rank_tokens}; write "
            f"rank_tokens: {-(-needed // widest)}, or use more ranks"
        )
    tokens = most_tokens(batch) + length
    largest = tokens * most_of_token(costs, length) + costs.per_microbatch * (2 * tokens + 8 * costs.microbatches_of)
    if largest >= MOST_COST:
        raise RecipeError(
            f"a batch of {tokens} tokens could cost {largest}, which exceeds 62 bits; use coarser costs",
            "balance.context",
        )


MOST_COST = 1 << 62
"""All costs of a step are below it, so that sums of two of them are int64."""


def most_of_token(costs: RunCosts, length: int) -> int:
    """The most that a token costs, where no sample has more than `length` tokens and each fits the longest run.

    It is the larger of two: what all ranks of the shortest run that holds a sample pay for each token of it, and what
    one rank and stage after the other pay in any run. In long runs few tokens are mostly padding, and all ranks of them
    together may pay more: the schedule leaves such runs out.
    """
    most, first = 0, 1
    pairs = costs.per_pair * length
    for size in costs.sizes:
        multiple = costs.align * (2 * size if size > 1 else 1)
        last = min(length, costs.rank_tokens * size // multiple * multiple)
        of_token = costs.per_token + costs.per_exchanged * (size - 1)
        if last >= first:
            of_pad = -(-of_token * (multiple - 1) // first)
            most = max(most, of_token + of_pad + costs.per_pair * last + size)
            first = last + 1
        of_rank = -(-costs.per_token * multiple // size) + costs.per_exchanged * (multiple // size) * (size - 1)
        most = max(most, (costs.stages + 1) * (of_rank + -(-pairs // size) + 1))
        padded = -(-length // multiple) * multiple
        most = max(most, pairs + -(-(of_token * padded + size) // length))  # one sample alone, in all ranks of any run
    return most


# --- The result.


class ContextPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The bins of a step, by microbatch and first rank. n samples, b bins; arrays int64."""

    num_microbatches: int
    microbatch_of_bin: Int64Array
    """[b] ascending."""
    first_rank_of_bin: Int64Array
    """[b] in [0, P), ranks numbered by replica, then CP slice; a multiple of the size; ascending in a microbatch."""
    size_of_bin: Int64Array
    """[b] ranks of the run. The runs of a microbatch are all ranks."""
    load_of_bin: Int64Array
    """[b] cost of each of its ranks; 0 where the bin has no piece."""
    tokens_of_bin: Int64Array
    """[b] tokens with padding, at most rank_tokens x size; 0 where the bin has no piece."""
    bin_of_sample: Int64Array
    """[n] in [0, b); samples of a bin are in ascending order."""
    padded_tokens: Int64Array
    """[n] tokens of each sample in its bin: a multiple of twice the size, of the size 1 a multiple of `align`."""
    align: int
    """As in `RunCosts`; of a bin that has no piece, too, whose ranks have the fewest tokens of padding."""

    @property
    def microbatch_of_sample(self) -> Int64Array:
        """int64 [n]."""
        return self.microbatch_of_bin[self.bin_of_sample]

    def load_of_ranks(self, num_ranks: int) -> Int64Array:
        """int64 [microbatches, P] what each rank pays."""
        return np.repeat(self.load_of_bin, self.size_of_bin).reshape(self.num_microbatches, num_ranks)


# --- The schedule.
#
# Samples of one length are alike but for their numbers, so a schedule counts lengths: a bin takes so many samples of
# each. Which they are follows at the end, the lower numbers first.


class _Way:
    """The distinct lengths of a step, ascending, and what a sample of each costs in runs of some sizes."""

    def __init__(self, tokens: Int64Array, costs: RunCosts, sizes: tuple[int, ...]) -> None:
        self.costs, self.sizes = costs, sizes
        lengths, counts = np.unique(tokens, return_counts=True)
        self.num_samples = len(tokens)
        self.counts: list[int] = counts.tolist()
        self.load: dict[int, list[int]] = {}
        """By size: what a rank pays for a sample of each length; ascending."""
        self.padded: dict[int, list[int]] = {}
        """By size: tokens of a sample of each length; ascending."""
        huge = np.iinfo(np.int64).max
        work, least = np.full(len(lengths), huge), np.full(len(lengths), huge)
        first_size, own = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
        for size in sizes:
            padded, load = costs.padded(lengths, size), costs.of_rank(lengths, size)
            self.load[size], self.padded[size] = load.tolist(), padded.tolist()
            holds = padded <= costs.rank_tokens * size
            work = np.where(holds, np.minimum(work, load * size), work)
            least = np.where(holds, np.minimum(least, load), least)
            own = np.where(holds & (first_size == 0), padded, own)
            first_size = np.where(holds & (first_size == 0), size, first_size)
        self.work: list[int] = work.tolist()
        """The least that all ranks together pay for a sample."""
        self.least: list[int] = least.tolist()
        """The least that a rank pays for a sample; ascending."""
        self.own: list[int] = own.tolist()
        """Tokens in the shortest run that holds a sample."""
        self.total_work, self.total_own = _product(self.work, self.counts), _product(self.own, self.counts)
        self.first_size = int(first_size[-1])
        """The shortest run that holds each sample."""
        alone = first_size * 2 > costs.num_ranks
        self.one_by_one = int(least[alone] @ counts[alone])
        """What samples pay of which no two fit side by side."""

    @property
    def fits_62_bits(self) -> bool:
        """Whether all samples together cost, and have, less."""
        return self.total_work < MOST_COST and self.total_own < MOST_COST

    def fitting(self, size: int, load: int, room: int) -> int:
        """The number of the longest length of which a sample fits both; -1: none."""
        return min(bisect_right(self.load[size], load), bisect_right(self.padded[size], room)) - 1

    def fewest_rows(self, own: int) -> int:
        """The fewest microbatches that hold so many tokens."""
        return -(-own // (self.costs.rank_tokens * self.costs.num_ranks))

    def lower_bound(self) -> int:
        """No schedule in runs of these sizes is cheaper."""
        costs, least = self.costs, self.least[-1]
        even = max(-(-self.total_work // costs.num_ranks), self.one_by_one, least)
        return max(even + (costs.stages - 1) * least + costs.per_microbatch * self.fewest_rows(self.total_own), 1)


def _product(values: list[int], counts: list[int]) -> int:
    """The sum of the values, each as often as it is counted; exact."""
    return sum(value * count for value, count in zip(values, counts, strict=True))


class _Bins(msgspec.Struct, eq=False):
    """Bins as they are made."""

    row: list[int] = msgspec.field(default_factory=list)
    """The microbatch of each, ascending."""
    size: list[int] = msgspec.field(default_factory=list)
    load: list[int] = msgspec.field(default_factory=list)
    tokens: list[int] = msgspec.field(default_factory=list)
    takes: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    """(bin, number of a length, how many samples of it), by bin."""

    def cut(self, num_bins: int, num_takes: int) -> None:
        """Forget the bins that were made later."""
        for column in (self.row, self.size, self.load, self.tokens):
            del column[num_bins:]
        del self.takes[num_takes:]

    def cost(self, num_rows: int, costs: RunCosts) -> int:
        """What they cost in so many microbatches."""
        most: dict[int, int] = {}
        for row, load in zip(self.row, self.load, strict=True):
            most[row] = max(most.get(row, 0), load)
        return _cost(list(most.values()), num_rows, costs)


def _cost(loads: Sequence[int], num_rows: int, costs: RunCosts) -> int:
    """What microbatches cost whose costliest ranks pay so much; others are empty."""
    return sum(loads) + (costs.stages - 1) * max(loads, default=0) + costs.per_microbatch * num_rows


class _Waiting:
    """The samples that are in no bin yet."""

    def __init__(self, way: _Way) -> None:
        self.way = way
        self.count = list(way.counts)
        self.below = list(range(-1, len(way.counts) - 1))
        """For a length of which no sample waits: a shorter one, with none that waits between them."""
        self.work, self.own = way.total_work, way.total_own

    def copy(self) -> _Waiting:
        found = copy(self)
        found.count, found.below = list(self.count), list(self.below)
        return found

    def longest(self, most: int | None = None) -> int:
        """The number of the longest length, up to that of `most`, of which a sample waits; -1: none."""
        at = len(self.count) - 1 if most is None else most
        found = at
        while found >= 0 and not self.count[found]:
            found = self.below[found]
        while at > found:
            self.below[at], at = found, self.below[at]
        return found

    def take(self, length: int, count: int) -> None:
        self.count[length] -= count
        self.work -= count * self.way.work[length]
        self.own -= count * self.way.own[length]

    def limit(self, num_rows: int) -> int:
        """An equal part of the work for each rank in so many microbatches, or what the longest sample needs."""
        return max(self.way.least[self.longest()], -(-self.work // (self.way.costs.num_ranks * num_rows)))


def _fill_row(waiting: _Waiting, limit: int, row: int, bins: _Bins) -> None:
    """One microbatch in which no rank pays more than `limit`.

    The longest sample that waits opens a bin, in the shortest run in which it keeps the limit; one that needs more
    ranks than are left is passed over.
    """
    way = waiting.way
    most = {size: way.fitting(size, limit, way.costs.rank_tokens * size) for size in way.sizes}
    ranks = way.costs.num_ranks
    while sizes := [size for size in way.sizes if size <= ranks]:
        first = waiting.longest(max(most[size] for size in sizes))
        if first < 0:
            return
        size = next(size for size in sizes if first <= most[size])
        bins.row.append(row)
        _fill_bin(waiting, first, limit, size, bins)
        ranks -= size


def _fill_bin(waiting: _Waiting, first: int, limit: int, size: int, bins: _Bins) -> None:
    """One bin: of the samples that wait, longest first, each for which there is room within the limit."""
    way = waiting.way
    load, padded = way.load[size], way.padded[size]
    left, room = limit, way.costs.rank_tokens * size
    length = first
    while length >= 0:
        count = min(waiting.count[length], room // padded[length])
        if load[length]:
            count = min(count, left // load[length])
        waiting.take(length, count)
        bins.takes.append((len(bins.size), length, count))
        left, room = left - count * load[length], room - count * padded[length]
        length = waiting.longest(min(length, way.fitting(size, left, room)))
    bins.size.append(size)
    bins.load.append(limit - left)
    bins.tokens.append(way.costs.rank_tokens * size - room)


ABOVE = (0, 1, 2, 4, 8, 16, 32, 64)
"""64ths by which the limit of a last microbatch is raised until it holds all that waits."""


def _fill_last_row(waiting: _Waiting, row: int, bins: _Bins) -> bool:
    """One microbatch with all that waits, if one of the limits allows it."""
    before, start = (len(bins.size), len(bins.takes)), waiting.limit(1)
    for above in ABOVE:
        trial = waiting.copy()
        _fill_row(trial, start + start * above // 64, row, bins)
        if trial.longest() < 0:
            return True
        bins.cut(*before)
    return False


def _in_rows(way: _Way, num_rows: int) -> tuple[_Bins, int]:
    """Bins in about so many microbatches, and how many they are.

    Each microbatch takes an equal part of the work that is left, so what it cannot have is spread over those behind it.
    """
    waiting, bins, row = _Waiting(way), _Bins(), 0
    while waiting.longest() >= 0:
        num_rows += way.costs.microbatches_of if row == num_rows else 0
        rows_left = max(num_rows - row, way.fewest_rows(waiting.own))
        if rows_left == 1 and _fill_last_row(waiting, row, bins):
            return bins, num_rows
        _fill_row(waiting, waiting.limit(max(rows_left, 2)), row, bins)
        row += 1
    return bins, -(-row // way.costs.microbatches_of) * way.costs.microbatches_of


MORE_ROWS = 4
"""How many numbers of microbatches are tried, from the fewest on."""


class RunSchedule(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Bins, not yet in the order of time and ranks. n samples, b bins with samples; arrays int64."""

    cost: int
    num_rows: int
    """Microbatches; some may have no bin."""
    row_of_bin: Int64Array
    """[b] in [0, num_rows), ascending."""
    size_of_bin: Int64Array
    """[b] ranks of its run."""
    load_of_bin: Int64Array
    """[b] what each of its ranks pays."""
    tokens_of_bin: Int64Array
    """[b] tokens with padding."""
    bin_of_sample: Int64Array
    """[n] in [0, b)."""


OF_BIN = ("row_of_bin", "size_of_bin", "load_of_bin", "tokens_of_bin")


class Search(NamedTuple):
    """What a search finds."""

    schedule: RunSchedule
    """The cheapest of those that are tried."""
    is_in_order: bool
    """Whether it is one of `in_order`."""
    lower_bound: int
    """No schedule is cheaper."""
    in_order_cost: int
    """The cost of `in_order` in the shortest runs that hold all samples."""


def searched(tokens: Int64Array, costs: RunCosts) -> Search:
    """The cheapest schedule; arguments as those of `place_in_contexts`."""
    return _searched_natively(tokens, costs) if is_native() else searched_plainly(tokens, costs)


def _searched_natively(tokens: Int64Array, costs: RunCosts) -> Search:
    sizes = np.array(costs.sizes, np.int64)
    written = {name: np.empty(len(tokens), np.int64) for name in ("bin_of_sample", *OF_BIN)}
    call = Contexts(
        tokens=array_of(tokens, np.int64),
        sizes=array_of(sizes, np.int64),
        **{name: array_of(column, np.int64) for name, column in written.items()},
        **{name: getattr(costs, name) for name in RunCosts.__struct_fields__ if name != "sizes"},
    )
    run(call)
    if call.in_order_size:
        schedule = in_order(tokens, costs, call.in_order_size)
    else:
        of_bins = {name: written[name][: call.num_bins] for name in OF_BIN}
        schedule = RunSchedule(
            cost=call.cost, num_rows=call.num_rows, bin_of_sample=written["bin_of_sample"], **of_bins
        )
    return Search(schedule, call.in_order_size > 0, call.lower_bound, call.in_order_cost)


def searched_plainly(tokens: Int64Array, costs: RunCosts) -> Search:
    """The reference of `tm_contexts` in contexts.c."""
    way = _Way(tokens, costs, costs.sizes)
    lower_bound, first_size = way.lower_bound(), way.first_size
    best, is_in_order = _cheapest(way, tokens, None), False
    for size in costs.sizes:
        if size < first_size:
            continue
        if len(costs.sizes) > 1:
            way = _Way(tokens, costs, (size,))
        if not way.fits_62_bits or way.lower_bound() >= best.cost:
            continue
        if len(costs.sizes) > 1:
            found = _cheapest(way, tokens, best)
            is_in_order = is_in_order and found is best
            best = found
        plain = in_order(tokens, costs, size)
        if plain.cost < best.cost:
            best, is_in_order = plain, True
    return Search(best, is_in_order, lower_bound, in_order(tokens, costs, first_size).cost)


def _cheapest(way: _Way, tokens: Int64Array, best: RunSchedule | None) -> RunSchedule:
    """The cheapest schedule of a way, if it is cheaper than the best so far."""
    multiple = way.costs.microbatches_of
    fewest = -(-way.fewest_rows(way.total_own) // multiple)
    for rows in range(fewest, fewest + MORE_ROWS):
        bins, num_rows = _in_rows(way, rows * multiple)
        if best is None or bins.cost(num_rows, way.costs) < best.cost:
            best = _schedule_of(bins, num_rows, way, tokens)
    assert best is not None, "several numbers are tried"
    return best


def _schedule_of(bins: _Bins, num_rows: int, way: _Way, tokens: Int64Array) -> RunSchedule:
    by_length = np.argsort(tokens, kind="stable")
    place = [0, *np.cumsum(way.counts).tolist()]
    bin_of_sample = np.empty(len(tokens), np.int64)
    for number, length, count in bins.takes:
        bin_of_sample[by_length[place[length] : place[length] + count]] = number
        place[length] += count
    return RunSchedule(
        cost=bins.cost(num_rows, way.costs),
        num_rows=num_rows,
        row_of_bin=np.array(bins.row, np.int64),
        size_of_bin=np.array(bins.size, np.int64),
        load_of_bin=np.array(bins.load, np.int64),
        tokens_of_bin=np.array(bins.tokens, np.int64),
        bin_of_sample=bin_of_sample,
    )


def shortest_run(tokens: Int64Array, costs: RunCosts) -> int:
    """The least size that holds each of the samples."""
    return _Way(tokens, costs, costs.sizes).first_size


def in_order(tokens: Int64Array, costs: RunCosts, size: int | None = None) -> RunSchedule:
    """Samples by number in runs of one size; a bin is closed where the next sample does not fit. None: the shortest
    that holds all samples."""
    if size is None:
        size = shortest_run(tokens, costs)
    room = np.cumsum(costs.padded(tokens, size))
    starts: list[int] = []
    stop = 0
    while stop < len(tokens):
        starts.append(stop)
        before = int(room[stop - 1]) if stop else 0
        stop = int(np.searchsorted(room, before + costs.rank_tokens * size, side="right"))
    row = np.arange(len(starts)) // (costs.num_ranks // size)
    num_rows = -(-(int(row[-1]) + 1) // costs.microbatches_of) * costs.microbatches_of
    load = np.add.reduceat(costs.of_rank(tokens, size), starts)
    return RunSchedule(
        cost=_cost(np.maximum.reduceat(load, np.flatnonzero(np.diff(row, prepend=-1))).tolist(), num_rows, costs),
        num_rows=num_rows,
        row_of_bin=row,
        size_of_bin=np.full(len(starts), size),
        load_of_bin=load,
        tokens_of_bin=np.diff(room[[*(start - 1 for start in starts[1:]), len(tokens) - 1]], prepend=0),
        bin_of_sample=np.repeat(np.arange(len(starts)), np.diff([*starts, len(tokens)])),
    )


def loads_in_order(tokens: Int64Array, costs: RunCosts) -> Int64Array:
    """int64 [microbatches, P] what each rank pays where samples are placed by their numbers, as for `hash_order_cost`;
    the costliest microbatch is in the middle."""
    return planned(in_order(tokens, costs), tokens, costs).load_of_ranks(costs.num_ranks)


def least_work(tokens: Int64Array, costs: RunCosts) -> int:
    """The least that all ranks together pay for samples, each in the run that suits it best."""
    return _Way(tokens, costs, costs.sizes).total_work


def least_load(tokens: Int64Array, costs: RunCosts) -> int:
    """The least that a rank pays for the longest of some samples, in the run that suits it best."""
    return _Way(tokens, costs, costs.sizes).least[-1]


# --- A step: the cheapest schedule, in the order of microbatches and ranks.


def place_in_contexts(tokens: Int64Array, costs: RunCosts) -> tuple[ContextPlan, BalanceReport]:
    """Place the samples of a step.

    Microbatch after microbatch is filled within a limit of what a rank may pay: the work that is left, divided evenly
    over all ranks and the microbatches that are left. This is done for several numbers of microbatches, with runs of
    all sizes and with runs of each size alone; the cheapest schedule is taken. So none is dearer than one of a fixed
    size, nor than that of `hash_order_cost`.

    Args:
        tokens: int64 [n] of each sample, 1 or more; each fits the longest run.
        costs: The costs of the layout.

    Returns:
        The bins, and their cost against the lower bound. `hash_order_cost` is what samples in the order of their
        numbers cost in runs of one size, each bin closed where the next sample does not fit: Megatron's `dp_balanced`.

    Sources: first fit decreasing within a limit is MULTIFIT (Coffman, Garey and Johnson 1978); the shortest run that
    keeps a limit follows FlexSP (arXiv 2412.01523) and ByteScale (arXiv 2502.21231).
    """
    found = searched(tokens, costs)
    report = BalanceReport(
        cost=found.schedule.cost,
        hash_order_cost=found.in_order_cost,
        lower_bound=found.lower_bound,
        took_hash_order=found.is_in_order,
    )
    return planned(found.schedule, tokens, costs), report


def planned(schedule: RunSchedule, tokens: Int64Array, costs: RunCosts) -> ContextPlan:
    """A schedule in the order of microbatches and ranks; ranks that have no bin get empty ones."""
    least, num_rows = costs.sizes[0], schedule.num_rows
    idle = np.full(num_rows, costs.num_ranks)
    np.subtract.at(idle, schedule.row_of_bin, schedule.size_of_bin)
    empty = np.repeat(np.arange(num_rows), idle // least)
    none = np.zeros(len(empty), np.int64)
    row = np.concatenate([schedule.row_of_bin, empty])
    size = np.concatenate([schedule.size_of_bin, none + least])
    load = np.concatenate([schedule.load_of_bin, none])
    lowest = np.full(len(row), len(tokens))
    lowest[schedule.bin_of_sample[::-1]] = np.arange(len(tokens))[::-1]
    dearest = np.zeros(num_rows, np.int64)
    np.maximum.at(dearest, row, load)
    time_of_row = np.empty(num_rows, np.int64)
    time_of_row[np.argsort(-dearest, kind="stable")] = small_at_both_ends(num_rows)
    order = np.lexsort((lowest, -load, time_of_row[row] * (costs.num_ranks + 1) - size))  # by time, then largest first
    place = np.empty(len(row), np.int64)
    place[order] = np.arange(len(row))
    stops = np.cumsum(size[order])
    of_bin = schedule.size_of_bin
    multiple = (costs.align * np.where(of_bin > 1, 2 * of_bin, 1))[schedule.bin_of_sample]
    return ContextPlan(
        num_microbatches=num_rows,
        microbatch_of_bin=time_of_row[row][order],
        first_rank_of_bin=(stops - size[order]) % costs.num_ranks,
        size_of_bin=size[order],
        load_of_bin=load[order],
        tokens_of_bin=np.concatenate([schedule.tokens_of_bin, none])[order],
        bin_of_sample=place[schedule.bin_of_sample],
        padded_tokens=-(-tokens // multiple) * multiple,
        align=costs.align,
    )


# --- Runs that somebody else has chosen: a strategy of the user's.


def plan_of_runs(
    tokens: Int64Array, microbatch: Int64Array, first_rank: Int64Array, size: Int64Array, costs: RunCosts
) -> tuple[ContextPlan, BalanceReport]:
    """The plan of samples that are in given runs; ranks that have none get empty bins of the least size.

    Args:
        tokens: int64 [n] of each sample.
        microbatch: int64 [n] of each sample, 0 or more.
        first_rank: int64 [n] the first rank of the sample's run, a multiple of its size.
        size: int64 [n] ranks of this run, one of the layout's sizes.
        costs: Of the layout.

    Raises:
        PlanError: Runs overlap, are not aligned, or hold too many tokens.
    """
    for name, values in (("microbatch", microbatch), ("first_rank", first_rank), ("size", size)):
        if not isinstance(values, np.ndarray) or values.shape != tokens.shape or values.dtype != np.int64:
            raise PlanError(f"{name} must be int64 [{len(tokens)}], a number for each sample")
    least, rows = costs.sizes[0], int(microbatch.max(initial=0)) + 1
    outside = (microbatch < 0) | (first_rank < 0) | (first_rank % least != 0) | (first_rank + size > costs.num_ranks)
    outside |= ~np.isin(size, costs.sizes) | (microbatch >= len(tokens) + costs.microbatches_of)
    if outside.any():
        at = int(np.argmax(outside))
        raise PlanError(
            f"sample {at} is in microbatch {microbatch[at]}, in a run of {size[at]} ranks from rank {first_rank[at]}; "
            f"runs have {', '.join(map(str, costs.sizes))} ranks of {costs.num_ranks}"
        )
    keys, bin_of_sample = np.unique(np.stack([microbatch, first_rank, size], axis=1), axis=0, return_inverse=True)
    bin_of_sample = bin_of_sample.reshape(-1)
    num_rows = -(-rows // costs.microbatches_of) * costs.microbatches_of
    is_free = np.ones((num_rows, costs.num_ranks // least), bool)
    for row, first, ranks in keys.tolist():
        is_free[row, first // least : (first + ranks) // least] = False
    free_row, free_at = np.nonzero(is_free)
    empty = np.stack([free_row, free_at * least, np.full(len(free_row), least)], axis=1)
    bins = np.concatenate([keys, empty])
    order = np.lexsort((bins[:, 1], bins[:, 0]))
    place = np.empty(len(bins), np.int64)
    place[order] = np.arange(len(bins))
    bins, bin_of_sample = bins[order], place[bin_of_sample]
    padded, load = np.empty_like(tokens), np.empty_like(tokens)
    for each in np.unique(size).tolist():
        mine = size == each
        padded[mine], load[mine] = costs.padded(tokens[mine], each), costs.of_rank(tokens[mine], each)
    plan = ContextPlan(
        num_microbatches=num_rows,
        microbatch_of_bin=np.ascontiguousarray(bins[:, 0]),
        first_rank_of_bin=np.ascontiguousarray(bins[:, 1]),
        size_of_bin=np.ascontiguousarray(bins[:, 2]),
        load_of_bin=sums_of_bins(load, bin_of_sample, len(bins)),
        tokens_of_bin=sums_of_bins(padded, bin_of_sample, len(bins)),
        bin_of_sample=bin_of_sample,
        padded_tokens=padded,
        align=costs.align,
    )
    check_contexts(plan, tokens, costs)
    report = BalanceReport(
        cost=_cost(plan.load_of_ranks(costs.num_ranks).max(axis=1).tolist(), num_rows, costs),
        hash_order_cost=in_order(tokens, costs).cost,
        lower_bound=_Way(tokens, costs, costs.sizes).lower_bound(),
    )
    return plan, report


def check_contexts(plan: ContextPlan, tokens: Int64Array, costs: RunCosts) -> None:
    """Refuse runs that delivery could not follow; nothing is believed that can be computed.

    Raises:
        PlanError: Names the first rule that is broken, with values.
    """
    columns = {name: getattr(plan, name) for name in ContextPlan.__struct_fields__ if name.endswith("_bin")}
    num_bins = len(plan.size_of_bin)
    columns |= {"bin_of_sample": plan.bin_of_sample, "padded_tokens": plan.padded_tokens}
    for name, values in columns.items():
        count = num_bins if name.endswith("_bin") else len(tokens)
        if not isinstance(values, np.ndarray) or values.shape != (count,) or values.dtype != np.int64:
            raise PlanError(f"{name} must be int64 [{count}]")
    if plan.num_microbatches < 1 or plan.num_microbatches % costs.microbatches_of:
        raise PlanError(f"{plan.num_microbatches} microbatches are no multiple of {costs.microbatches_of}")
    size, first = plan.size_of_bin, plan.first_rank_of_bin
    wrong = ~np.isin(size, costs.sizes) | (first % np.maximum(size, 1) != 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise PlanError(
            f"bin {at} has {size[at]} ranks from rank {first[at]}; runs have {', '.join(map(str, costs.sizes))} ranks, "
            f"and begin at a multiple of their size"
        )
    before = np.cumsum(size) - size
    apart = plan.microbatch_of_bin * costs.num_ranks + first != before
    if apart.any() or int(size.sum()) != plan.num_microbatches * costs.num_ranks:
        at = int(np.argmax(apart)) if apart.any() else num_bins - 1
        raise PlanError(
            f"bin {at} is of microbatch {plan.microbatch_of_bin[at]}, rank {first[at]} on: by microbatch and rank, "
            f"runs cover each of {costs.num_ranks} ranks once in each of {plan.num_microbatches} microbatches"
        )
    held = plan.bin_of_sample
    if len(held) and not 0 <= held.min() <= held.max() < num_bins:
        raise PlanError(f"a sample is in bin {held.min()} or {held.max()}; there are 0 to {num_bins - 1}")
    padded = np.empty_like(tokens)
    for each in np.unique(size[held]).tolist():
        mine = size[held] == each
        padded[mine] = costs.padded(tokens[mine], each)
    wanted = {"padded_tokens": padded, "tokens_of_bin": sums_of_bins(padded, held, num_bins)}
    wanted["load_of_bin"] = np.maximum(plan.load_of_bin, 0)  # a strategy may have a cost of its own
    for name, values in wanted.items():
        if not np.array_equal(getattr(plan, name), values):
            at = int(np.argmax(getattr(plan, name) != values))
            raise PlanError(f"{name} is {getattr(plan, name)[at]} at {at}; it must be {values[at]}")
    full = plan.tokens_of_bin > costs.rank_tokens * size
    if full.any():
        at = int(np.argmax(full))
        raise PlanError(
            f"bin {at} has {plan.tokens_of_bin[at]} tokens with padding; its {size[at]} ranks hold "
            f"{costs.rank_tokens * size[at]}"
        )
    if plan.align != costs.align:
        raise PlanError(f"align is {plan.align}, in the recipe {costs.align}")
