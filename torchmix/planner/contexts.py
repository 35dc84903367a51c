"""Pieces -> bins of runs of ranks: how many ranks share a document, and which documents share ranks.

In each microbatch the DP x CP ranks fall into aligned runs. A run has one bin, and each of its ranks computes an equal
part of every document in it. The schedule makes the sum over microbatches of the costliest rank small. All numbers are
integers, so every leader plans the same. Cost: 10 to 350 ms a step at 16 and 64 ranks with 300 to 12,000 pieces, 15 s
at 1,024 ranks with 193,000: a loop in Python over bins.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import RecipeError, TopologyError
from torchmix.parallel.place_tree import Layout, powers_up_to
from torchmix.planner.balance import BalanceReport, CostModel, small_at_both_ends
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
    exchanged = -(-cost.per_token // DEFAULT_EXCHANGE) if context.per_exchanged is None else context.per_exchanged
    num_ranks = layout.dp * layout.cp
    return RunCosts(
        per_token=cost.per_token,
        per_pair=cost.per_pair,
        per_exchanged=exchanged,
        per_microbatch=context.per_microbatch,
        rank_tokens=context.rank_tokens,
        align=context.align,
        sizes=sizes_of_layout(context.sizes, num_ranks),
        num_ranks=num_ranks,
        stages=layout.pp,
    )


DEFAULT_EXCHANGE = 128
"""An exchanged token costs this part of a computed one where the recipe does not say: of runs that would be equal the
short ones are taken. It is a convention, not a measurement."""


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
    padding = 2 * costs.align * costs.num_ranks
    of_token = (costs.per_token + costs.per_exchanged * costs.num_ranks) * (1 + padding) + costs.per_pair * length
    tokens = most_tokens(batch) + length
    largest = tokens * (of_token * costs.stages + costs.per_microbatch)
    if largest >= 1 << 62:
        raise RecipeError(
            f"a batch of {tokens} tokens could cost {largest}, which exceeds 62 bits; use coarser costs",
            "balance.context",
        )


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


class _Bin(msgspec.Struct):
    """A bin in the making."""

    size: int
    load: int
    tokens: int
    runs: list[tuple[int, int]]
    """Ranges of pieces, longest piece first."""


class _Schedule(msgspec.Struct):
    cost: int
    rows: list[list[_Bin]]
    """Costliest bin first in each microbatch, costliest microbatch first."""


class _Pieces:
    """The pieces of a step, longest first, with sums of what they cost and take."""

    def __init__(self, tokens: Int64Array, costs: RunCosts) -> None:
        self.costs = costs
        self.order = np.argsort(-tokens, kind="stable")
        sorted_tokens = tokens[self.order]
        self.count = len(tokens)
        self.load: dict[int, list[int]] = {}
        """By size: what a rank pays for each piece, negated so that it ascends."""
        self.room: dict[int, list[int]] = {}
        """By size: padded tokens of each piece, negated."""
        self.load_before: dict[int, list[int]] = {}
        self.room_before: dict[int, list[int]] = {}
        least: Int64Array | None = None
        dearest = np.full(self.count, np.iinfo(np.int64).max)
        first_size = np.zeros(self.count, np.int64)
        for size in costs.sizes:
            padded, load = costs.padded(sorted_tokens, size), costs.of_rank(sorted_tokens, size)
            fits = padded <= costs.rank_tokens * size
            self.load[size], self.room[size] = (-load).tolist(), (-padded).tolist()
            self.load_before[size] = [0, *np.cumsum(load).tolist()]
            self.room_before[size] = [0, *np.cumsum(padded).tolist()]
            huge = np.iinfo(np.int64).max
            whole = np.where(fits, load * size, huge)
            least = whole if least is None else np.minimum(least, whole)
            dearest = np.minimum(dearest, np.where(fits, load, huge))
            first_size = np.where(fits & (first_size == 0), size, first_size)
        assert least is not None, "a layout has sizes"
        self.whole = int(least.sum())
        """The least that all ranks together pay for all pieces."""
        self.least_load = int(dearest.max(initial=0))
        """The least limit of a rank's load within which each piece fits some run."""
        self.first_size: list[int] = first_size.tolist()
        """The shortest run that holds each piece."""
        half = first_size * 2 > costs.num_ranks
        self.one_by_one = int(dearest[half].sum())
        """What pieces pay of which no two fit side by side."""
        own = np.concatenate([costs.padded(sorted_tokens[first_size == size], size) for size in costs.sizes])
        self.least_rows = -(-int(own.sum()) // (costs.rank_tokens * costs.num_ranks))

    def keeps(self, piece: int, size: int, most: int) -> bool:
        """Whether a run holds a piece, and its ranks pay at most `most` for it."""
        return -self.load[size][piece] <= most and -self.room[size][piece] <= self.costs.rank_tokens * size


def place_in_contexts(tokens: Int64Array, costs: RunCosts) -> tuple[ContextPlan, BalanceReport]:
    """Place the samples of a step.

    For a limit of what a rank may pay in a microbatch, bins are filled one after the other, longest piece first; a bin
    has the shortest run in which its first piece keeps the limit. Bins of like cost then share microbatches. The limits
    tried are those at which the work would just fill one, two, ... microbatches more than the fewest possible, and
    some above each; the cheapest schedule is taken.

    Args:
        tokens: int64 [n] of each sample, 1 or more; each fits the longest run.
        costs: Of the layout.

    Returns:
        The bins, and their cost against the lower bound. `hash_order_cost` is what samples in the order of their
        numbers cost in runs of one size, each bin closed where the next sample does not fit: Megatron's `dp_balanced`.

    Sources: first fit decreasing under a searched limit is MULTIFIT (Coffman, Garey and Johnson 1978); the shortest
    run that keeps a limit follows FlexSP (arXiv 2412.01523) and ByteScale (arXiv 2502.21231).
    """
    pieces = _Pieces(tokens, costs)
    plain = _in_order(tokens, pieces)
    best = _evened(_searched(pieces), pieces, tokens)
    if took_plain := plain.cost < best.cost:
        best = plain
    plan = _plan(best, pieces, tokens)
    report = BalanceReport(
        cost=_cost(plan.load_of_ranks(costs.num_ranks).max(axis=1).tolist(), costs),
        hash_order_cost=plain.cost,
        lower_bound=lower_bound(pieces),
        took_hash_order=took_plain,
    )
    return plan, report


def loads_in_order(tokens: Int64Array, costs: RunCosts) -> Int64Array:
    """int64 [microbatches, P] what each rank pays where samples are placed by their numbers, as for `hash_order_cost`;
    the costliest microbatch is the first."""
    rows = _in_order(tokens, _Pieces(tokens, costs)).rows
    found = np.zeros((len(rows), costs.num_ranks), np.int64)
    for row, loads in zip(rows, found, strict=True):
        of_ranks = np.repeat([each.load for each in row], [each.size for each in row])
        loads[: len(of_ranks)] = of_ranks
    return found


def least_work(tokens: Int64Array, costs: RunCosts) -> int:
    """The least that all ranks together pay for pieces, each in the run that suits it best."""
    return _Pieces(tokens, costs).whole


def lower_bound(pieces: _Pieces) -> int:
    """No schedule of these pieces is cheaper."""
    costs = pieces.costs
    even = max(-(-pieces.whole // costs.num_ranks), pieces.one_by_one, pieces.least_load)
    return max(even + (costs.stages - 1) * pieces.least_load + costs.per_microbatch * pieces.least_rows, 1)


MORE_ROWS = 4
"""How many numbers of microbatches are tried, from the fewest on."""
ABOVE = (1, 2, 4, 8, 16, 32, 64)
"""64ths by which a limit is raised until the pieces fit the number of microbatches."""


def _searched(pieces: _Pieces) -> _Schedule:
    """The cheapest schedule of the limits that are tried."""
    costs = pieces.costs
    best = _within(pieces, None)
    fewest = len(best.rows)
    for rows in range(fewest, fewest + MORE_ROWS):
        start = max(pieces.least_load, -(-pieces.whole // (costs.num_ranks * rows)))
        for above in ABOVE:
            found = _within(pieces, start + start * above // 64)
            if found.cost < best.cost:
                best = found
            if len(found.rows) <= rows:
                break
    return best


def _evened(schedule: _Schedule, pieces: _Pieces, tokens: Int64Array) -> _Schedule:
    """The same microbatches, each with the least limit within which its pieces are still one microbatch."""
    costs = pieces.costs
    rows = []
    for row in schedule.rows:
        places = np.sort(np.concatenate([np.arange(start, stop) for each in row for start, stop in each.runs]))
        own = _Pieces(tokens[pieces.order[places]], costs)
        back = places[own.order]
        start = max(own.least_load, -(-own.whole // costs.num_ranks))
        for above in ABOVE:
            limit = start + start * above // 64
            if limit >= row[0].load:
                break
            found = _within(own, limit).rows
            if len(found) == 1:
                row = [_moved(each, back) for each in found[0]]
                break
        rows.append(row)
    rows.sort(key=lambda row: -row[0].load)
    return _Schedule(cost=_cost([row[0].load for row in rows], costs), rows=rows)


def _moved(each: _Bin, places: Int64Array) -> _Bin:
    """A bin of some of the pieces, as one of all."""
    runs = [(at, at + 1) for start, stop in each.runs for at in places[start:stop].tolist()]
    return _Bin(size=each.size, load=each.load, tokens=each.tokens, runs=runs)


def _within(pieces: _Pieces, limit: int | None) -> _Schedule:
    """Bins whose ranks pay at most `limit`, in microbatches; None: no limit."""
    costs = pieces.costs
    most = limit if limit is not None else (1 << 62)
    bins: list[_Bin] = []
    starts, stops = [0], [pieces.count]  # ranges of pieces that wait, ascending
    while starts:
        first = starts[0]
        size = pieces.first_size[first]
        if -pieces.load[size][first] > most:
            size = next(each for each in costs.sizes if each > size and pieces.keeps(first, each, most))
        load, room = pieces.load[size], pieces.room[size]
        load_before, room_before = pieces.load_before[size], pieces.room_before[size]
        left, space = most, costs.rank_tokens * size
        runs: list[tuple[int, int]] = []
        at = 0
        while True:
            # Pieces are longest first, so those that fit follow the first one that does.
            fits = max(bisect_left(load, -left), bisect_left(room, -space))
            at = bisect_right(stops, fits, at)
            if at == len(stops):
                break
            begin = max(fits, starts[at])
            end = bisect_right(load_before, load_before[begin] + left, begin, stops[at] + 1) - 1
            end = bisect_right(room_before, room_before[begin] + space, begin, end + 1) - 1
            runs.append((begin, end))
            left -= load_before[end] - load_before[begin]
            space -= room_before[end] - room_before[begin]
            if begin == starts[at] and end == stops[at]:
                del starts[at], stops[at]
            elif begin == starts[at]:
                starts[at] = end
            elif end == stops[at]:
                stops[at] = begin
                at += 1
            else:
                starts.insert(at + 1, end)
                stops.insert(at, begin)
                at += 1
        bins.append(_Bin(size=size, load=most - left, tokens=costs.rank_tokens * size - space, runs=runs))
    rows = _in_rows(bins, costs)
    return _Schedule(cost=_cost([row[0].load for row in rows], costs), rows=rows)


def _in_rows(bins: list[_Bin], costs: RunCosts) -> list[list[_Bin]]:
    """Microbatches of bins of like cost: the costliest bin left, then each next one for which ranks are left."""
    waiting: dict[int, list[tuple[int, int]]] = {size: [] for size in costs.sizes}
    for number in sorted(range(len(bins)), key=lambda each: (bins[each].load, -each)):
        waiting[bins[number].size].append((bins[number].load, -number))  # the costliest is the last
    rows: list[list[_Bin]] = []
    left = len(bins)
    while left:
        row, ranks = [], costs.num_ranks
        while True:
            heads = [(*queue[-1], size) for size, queue in waiting.items() if queue and size <= ranks]
            if not heads:
                break
            _, number, size = max(heads)
            waiting[size].pop()
            row.append(bins[-number])
            ranks -= size
        left -= len(row)
        rows.append(row)
    return rows


def _in_order(tokens: Int64Array, pieces: _Pieces) -> _Schedule:
    """Samples by number in runs of one size: the shortest that holds them all."""
    costs = pieces.costs
    size = max(pieces.first_size)
    place = np.empty(pieces.count, np.int64)
    place[pieces.order] = np.arange(pieces.count)
    room = np.cumsum(costs.padded(tokens, size))
    load = np.concatenate([np.zeros(1, np.int64), np.cumsum(costs.of_rank(tokens, size))])
    bins: list[_Bin] = []
    first = before = 0
    while first < pieces.count:
        stop = int(np.searchsorted(room, before + costs.rank_tokens * size, side="right"))
        runs = [(at, at + 1) for at in np.sort(place[first:stop]).tolist()]
        after = int(room[stop - 1])
        bins.append(_Bin(size=size, load=int(load[stop] - load[first]), tokens=after - before, runs=runs))
        first, before = stop, after
    width = costs.num_ranks // size
    rows = [sorted(bins[at : at + width], key=lambda each: -each.load) for at in range(0, len(bins), width)]
    rows.sort(key=lambda row: -row[0].load)
    return _Schedule(cost=_cost([row[0].load for row in rows], costs), rows=rows)


def _cost(rows: Sequence[int], costs: RunCosts) -> int:
    """What microbatches cost whose costliest ranks pay so much."""
    return sum(rows) + (costs.stages - 1) * max(rows, default=0) + costs.per_microbatch * len(rows)


# --- Ranks that no bin has, and the order of all.


def _with_all_ranks(row: list[_Bin], pieces: _Pieces) -> list[_Bin]:
    """The bins of a microbatch after idle ranks took their part, or have bins without pieces."""
    costs = pieces.costs
    idle = costs.num_ranks - sum(each.size for each in row)
    count = itertools.count()
    waiting = [(-each.load, next(count), each) for each in row]
    done: list[_Bin] = []
    heapq.heapify(waiting)
    while waiting and idle:
        each = heapq.heappop(waiting)[2]
        parts = _parted(each, idle, pieces) or _widened(each, idle, pieces)
        if not parts:
            done.append(each)
            continue
        idle -= sum(part.size for part in parts) - each.size
        for part in parts:
            heapq.heappush(waiting, (-part.load, next(count), part))
    least = costs.sizes[0]
    empty = [_Bin(size=least, load=0, tokens=0, runs=[]) for _ in range(idle // least)]
    return [*done, *(each for *_, each in waiting), *empty]


def _parted(each: _Bin, idle: int, pieces: _Pieces) -> list[_Bin]:
    """Two bins with the pieces of one, dealt in turn; none where it has one piece, or too few ranks are idle."""
    places = _places(each)
    if len(places) < 2 or each.size > idle:
        return []
    return [_bin_of(places[first::2], each.size, pieces) for first in (0, 1)]


def _widened(each: _Bin, idle: int, pieces: _Pieces) -> list[_Bin]:
    """The bin in the next longer run; none where too few ranks are idle, or its ranks would not pay less."""
    wider = next((size for size in pieces.costs.sizes if size > each.size), 0)
    if not wider or wider - each.size > idle:
        return []
    found = _bin_of(_places(each), wider, pieces)
    return [found] if found.load < each.load and found.tokens <= pieces.costs.rank_tokens * wider else []


def _places(each: _Bin) -> list[int]:
    return [at for start, stop in each.runs for at in range(start, stop)]


def _bin_of(places: list[int], size: int, pieces: _Pieces) -> _Bin:
    load, room = pieces.load[size], pieces.room[size]
    return _Bin(
        size=size,
        load=-sum(load[at] for at in places),
        tokens=-sum(room[at] for at in places),
        runs=[(at, at + 1) for at in places],
    )


def _plan(schedule: _Schedule, pieces: _Pieces, tokens: Int64Array) -> ContextPlan:
    """The bins in the order of microbatches and ranks."""
    costs = pieces.costs
    full = sorted((_with_all_ranks(row, pieces) for row in schedule.rows), key=lambda row: -max(b.load for b in row))
    in_time = np.argsort(small_at_both_ends(len(full)), kind="stable").tolist()
    bin_of_sample = np.empty(pieces.count, np.int64)
    padded = np.empty(pieces.count, np.int64)
    table: list[tuple[int, int, int, int, int]] = []
    for microbatch, number in enumerate(in_time):
        of_bin = [(each, pieces.order[_places(each)]) for each in full[number]]
        of_bin.sort(key=lambda pair: (-pair[0].size, -pair[0].load, int(pair[1].min(initial=pieces.count))))
        rank = 0
        for each, samples in of_bin:
            bin_of_sample[samples] = len(table)
            padded[samples] = costs.padded(tokens[samples], each.size)
            table.append((microbatch, rank, each.size, each.load, each.tokens))
            rank += each.size
    columns = np.array(table, np.int64).reshape(-1, 5).T
    return ContextPlan(
        num_microbatches=len(full),
        microbatch_of_bin=columns[0],
        first_rank_of_bin=columns[1],
        size_of_bin=columns[2],
        load_of_bin=columns[3],
        tokens_of_bin=columns[4],
        bin_of_sample=bin_of_sample,
        padded_tokens=padded,
        align=costs.align,
    )
