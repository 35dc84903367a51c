"""Sections "Placement" and "Modules" of docs/formats.md, written again from their text.

In: costs of samples or items and a layout, data-parallel ranks and samples of a microbatch. Out: (dp_rank, microbatch)
of each sample, the consumer of each item, what a placement costs, its bounds, and plan digests. Differencing is not
here: the page does not say its ties. Nothing here imports torchmix or numpy.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import gcd
from typing import NamedTuple


def costs_of_samples(cost: tuple[int, int, int], length: int, samples: int, rows: list[tuple[int, int]]) -> list[int]:
    """The cost of each sample; `cost` as of `BookJob`, `rows` are the sample and the tokens of each piece."""
    per_token, per_pair, per_whole_pair = cost
    costs = [per_token * length + per_whole_pair * length**2] * samples
    for sample, tokens in rows:
        costs[sample] += per_pair * tokens**2
    return costs


def placed_by_number(dp: int, size: int, samples: int) -> list[tuple[int, int]]:
    """`none`: (dp_rank, microbatch) of each sample."""
    return [(sample // size % dp, sample // (size * dp)) for sample in range(samples)]


def rows_in_time(count: int, microbatches: str) -> list[int]:
    """The rows, costliest first, in the order of microbatches."""
    if microbatches == "unimodal":
        return [*reversed(range(1, count, 2)), *range(0, count, 2)]
    return list(range(count))


def placed_by_rows(dp: int, size: int, costs: list[int], microbatches: str = "unimodal") -> list[tuple[int, int]]:
    """`rows`: (dp_rank, microbatch) of each sample."""
    samples = len(costs)
    dear_first = sorted(range(samples), key=lambda sample: (-costs[sample], sample))
    row_samples = dp * size
    count = samples // row_samples
    in_time = rows_in_time(count, microbatches)
    load, here = [0] * dp, [0] * dp
    place: dict[int, tuple[int, int]] = {}
    for start in range(0, samples, dp):
        if start % row_samples == 0:
            here = [0] * dp
        order = [(here[rank], load[rank], rank) for rank in range(dp)]
        ranks = [rank for _, _, rank in sorted(order)]
        for rank, sample in zip(ranks, dear_first[start : start + dp], strict=True):
            load[rank] += costs[sample]
            here[rank] += costs[sample]
            place[sample] = (rank, in_time.index(start // row_samples))
    return [place[sample] for sample in range(samples)]


def cost_of_step(costs: list[int], places: list[tuple[int, int]]) -> int:
    """The sum over microbatches of the cost of the slowest rank."""
    loads: dict[tuple[int, int], int] = {}
    for cost, place in zip(costs, places, strict=True):
        loads[place] = loads.get(place, 0) + cost
    microbatches = {microbatch for _, microbatch in places}
    return sum(max(load for (_, m), load in loads.items() if m == microbatch) for microbatch in microbatches)


def plan_digest(dp: int, size: int, places: list[tuple[int, int]], digest: bytes) -> str:
    """The digest of a placement, after the order digest."""
    message = digest + struct.pack("<qq", dp, size)
    for sample, place in enumerate(places):
        slot = places[:sample].count(place)
        message += struct.pack("<qqq", *place, slot)
    return hashlib.sha256(message).digest()[:8].hex()


Own = Callable[[list[int], int, int], list[int]]
"""A method of the user: costs, buckets and bins of each -> bins."""


class Balance(NamedTuple):
    """`balance` of a recipe, and the stages of the pipeline."""

    method: str
    level: str = "both"
    objective: str = "rows"
    microbatches: str = "unimodal"
    stages: int = 1
    own: Own | None = None


def _dear_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda each: (-costs[each], each))


def _sums(costs: Sequence[int], bins: Sequence[int], count: int) -> list[int]:
    sums = [0] * count
    for cost, number in zip(costs, bins, strict=True):
        sums[number] += cost
    return sums


def bins_of(costs: list[int], buckets: int, bins: int, balance: Balance) -> list[int]:
    """The bin of each sample, of equal counts."""
    if balance.own is not None:
        return balance.own(costs, buckets, bins)
    count = buckets * bins
    order, load, found = _dear_first(costs), [0] * count, [0] * len(costs)
    for start in range(0, len(costs), count):
        numbers = list(range(count))
        if balance.method != "zigzag":
            numbers.sort(key=lambda number: (load[number], number))
        elif start // count % 2:
            numbers.reverse()
        for sample, number in zip(order[start : start + count], numbers, strict=False):
            found[sample] = number
            load[number] += costs[sample]
    return found


def objective_of(places: list[tuple[int, int]], costs: list[int], dp: int, count: int, balance: Balance) -> int:
    """What a placement costs by the objective; `count` microbatches."""
    load = [[0] * dp for _ in range(count)]
    for (rank, microbatch), cost in zip(places, costs, strict=True):
        load[microbatch][rank] += cost
    rows = [max(row) for row in load]
    if balance.objective == "rank":
        return max(map(sum, zip(*load, strict=True)))
    if balance.objective == "max":
        return max(rows)
    return sum(rows) + ((balance.stages - 1) * max(rows) if balance.objective == "pipeline" else 0)


def bound_of(costs: list[int], dp: int, count: int, balance: Balance) -> int:
    """The lower bound of the objective."""
    of_rank = max(-(-sum(costs) // dp), *costs, 1)
    of_bin = max(-(-sum(costs) // (dp * count)), *costs, 1)
    if balance.objective == "max":
        return of_bin
    return of_rank + ((balance.stages - 1) * of_bin if balance.objective == "pipeline" else 0)


def placed(
    dp: int, size: int, costs: list[int], plain: list[tuple[int, int]], balance: Balance
) -> list[tuple[int, int]]:
    """Any method but differencing at any level, without groups; `plain` are the places of `none`."""
    count = len(costs) // (dp * size)
    places = list(plain)
    if balance.level == "both" and balance.method == "rows":
        return placed_by_rows(dp, size, costs, balance.microbatches)
    if balance.level == "both":
        bins = bins_of(costs, dp, count, balance)
        of_bin = [divmod(number, count) for number in range(dp * count)]
        if balance.own is None:
            of_bin = placed_by_rows(dp, 1, _sums(costs, bins, dp * count), "keep")
        places = [of_bin[number] for number in bins]
    elif balance.level == "bucket":
        total = [0] * dp
        for microbatch in range(count):
            mine = [sample for sample, (_, at) in enumerate(plain) if at == microbatch]
            here = [costs[sample] for sample in mine]
            buckets = bins_of(here, dp, 1, balance)
            rank_of = list(range(dp))
            if balance.own is None:
                ranks = sorted(range(dp), key=lambda rank: (total[rank], rank))
                for bucket, rank in zip(_dear_first(_sums(here, buckets, dp)), ranks, strict=True):
                    rank_of[bucket] = rank
            for sample, bucket in zip(mine, buckets, strict=True):
                places[sample] = rank_of[bucket], microbatch
                total[rank_of[bucket]] += costs[sample]
        return places
    else:
        for rank in range(dp):
            mine = [sample for sample, (at, _) in enumerate(plain) if at == rank]
            here = [costs[sample] for sample in mine]
            if balance.method == "rows":
                rows = [0] * len(mine)
                for place, number in enumerate(_dear_first(here)):
                    rows[number] = place // size
            else:
                rows = bins_of(here, 1, count, balance)
            if balance.own is None:
                order = _dear_first(_sums(here, rows, count))
                rows = [order.index(row) for row in rows]
            for sample, row in zip(mine, rows, strict=True):
                places[sample] = rank, row
    if balance.microbatches == "keep":
        return places
    load = _sums(costs, [rank * count + row for rank, row in places], dp * count)
    rows_by_cost = _dear_first([max(load[row::count]) for row in range(count)])
    in_time = rows_in_time(count, balance.microbatches)
    return [(rank, in_time.index(rows_by_cost.index(row))) for rank, row in places]


class ModuleBalance(NamedTuple):
    """How a module shares items out."""

    method: str
    cap: int | None = None
    own: Own | None = None


def items_near_text(costs: list[int], homes: list[int], count: int, dp: int, part: Fraction) -> list[list[int]]:
    """`near_text`: the consumer of each item by the two ways that the page tries, those that keep the limit."""
    largest = max(_sums(costs, items_by_lpt_or_fit(costs, count), count))
    limit = largest + int(largest * part)
    tried = [items_within(costs, count, limit, takes_first, homes, dp) for takes_first in (False, True)]
    return [found for found in tried if found is not None]


def items_within(
    costs: list[int], count: int, limit: int, takes_first: bool, homes: list[int] | None = None, dp: int = 1
) -> list[int] | None:
    """First fit, or the least loaded, within a limit; None: an item has no room."""
    load, found = [0] * count, [0] * len(costs)
    for item in _dear_first(costs):
        fits = [number for number in range(count) if load[number] + costs[item] <= limit]
        at_home = [] if homes is None else [number for number in fits if number * dp // count == homes[item]]
        if not fits:
            return None
        number = min(at_home or fits, key=lambda each: (load[each], each))
        if takes_first and not at_home:
            number = fits[0]
        found[item] = number
        load[number] += costs[item]
    return found


def bound_of_items(costs: list[int], count: int) -> int:
    """The lower bound of the costliest of some consumers."""
    order = sorted(costs, reverse=True)
    least = -(-sum(costs) // count)
    for full in range((len(costs) - 1) // count + 1 if costs else 0):
        least = max(least, sum(order[: full * count + 1][-full - 1 :]))
    unit = gcd(*costs) or 1
    return -(-least // unit) * unit


def items_by_lpt_or_fit(costs: list[int], count: int) -> list[int]:
    """`lpt`: longest processing time, or first fit within a lower limit."""
    found = items_by_lpt(costs, [0] * len(costs), count, 1)
    assert found is not None, "items without bytes have room"
    least, largest = bound_of_items(costs, count), max(_sums(costs, found, count))
    while largest - least > least // 1024:
        limit = (least + largest) // 2
        fit = items_within(costs, count, limit, takes_first=True)
        if fit is None:
            least = limit + 1
        else:
            found, largest = fit, max(_sums(costs, fit, count))
    return found


def items_by_lpt(costs: list[int], memory: list[int], count: int, cap: int) -> list[int] | None:
    """Longest processing time within a cap: the consumer of each item; None: one does not fit."""
    load, held, found = [0] * count, [0] * count, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda each: (-costs[each], -memory[each], each)):
        fits = [number for number in range(count) if held[number] + memory[item] <= cap]
        if not fits:
            return None
        number = min(fits, key=lambda each: (load[each], each))
        found[item] = number
        load[number] += costs[item]
        held[number] += memory[item]
    return found


def items_of_group(costs: list[int], memory: list[int], count: int, balance: ModuleBalance) -> list[int] | None:
    """The consumer of each item in a group, by lpt, zigzag or the user's method; None: the cap cannot be kept."""
    if balance.own is not None:
        return balance.own(costs, count, 1)
    found = items_by_lpt_or_fit(costs, count)
    if balance.method == "zigzag":
        found = bins_of(costs, count, 1, Balance("zigzag"))
    if balance.cap is not None and max(_sums(memory, found, count)) > balance.cap:
        return items_by_lpt(costs, memory, count, balance.cap)
    return found


def module_digest(digest: str, modules: dict[str, tuple[str, int, int, list[tuple[int, ...]]]]) -> str:
    """The plan digest with modules: axis, consumers, bins, and five numbers of each item."""
    if not modules:
        return digest
    message = bytes.fromhex(digest)
    for name, (axis, consumers, bins, items) in sorted(modules.items()):
        message += f"{name}\0{axis}\0".encode() + struct.pack("<qq", consumers, bins)
        message += b"".join(struct.pack("<5q", *item) for item in items)
    return hashlib.sha256(message).digest()[:8].hex()
