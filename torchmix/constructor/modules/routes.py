"""Plan -> the road of every row that a module gives: from the rank that computes it to those whose tokens it replaces.

In: the placement of a module's items and of the samples, and where ranks stand. Out: `RouteTable` of one replica: what
each of its ranks sends and receives. Must hold: what rank a sends to rank b is, in this order, what b receives from a;
each row reaches every rank that embeds its token, once. Cost: a few array operations a rank of the replica, over the
items that it computes or embeds.

A row travels between ranks of equal TP rank and stage where those compute the same items (axes DP and CP), else from
the one rank that has it to all TP ranks; then gradients come back from the first of these alone, since all have the
same. Under context parallelism the tokens of an item lie on several ranks, in runs, as `context_parallel.py` cuts them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from torchmix.array_types import Int32Array, Int64Array
from torchmix.parallel.modules.rank_places import RankPlaces
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.recipe.structs import Packing

SEND_COLUMNS = ("rank", "row", "rows", "returns")
"""To which rank, the first of the sender's rows, how many, and whether their gradients come back on this road."""
RECEIVE_COLUMNS = ("rank", "microbatch", "token", "rows", "returns")
"""From which rank, for which microbatch, the first token in it, how many, and whether gradients go back."""


class RouteTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The roads of one replica's ranks, by place in the replica and bin of the module."""

    sends: Int32Array
    """int32 [s, 4], see SEND_COLUMNS."""
    sends_stop: Int64Array
    """[places x bins] where each part of `sends` ends."""
    receives: Int32Array
    """int32 [r, 5], see RECEIVE_COLUMNS."""
    receives_stop: Int64Array
    """[places x bins] where each part of `receives` ends."""


def slice_align(packing: Packing) -> int | None:
    """What pieces are rounded up to where context parallelism cuts documents; None where it cuts samples.

    It cuts documents where packing aligns them and boundaries stop attention at them.
    """
    cuts_documents = packing.method != "concat" and packing.boundaries == "document"
    return packing.align_tokens if cuts_documents else None


class _Runs(NamedTuple):
    """Consecutive rows of items that lie side by side on one CP rank. int64 [k], in order of items."""

    item: Int64Array
    cp_rank: Int64Array
    row_in_item: Int64Array
    token: Int64Array
    """First token in the rank's slice of the sample."""
    rows: Int64Array


def route_table(
    plan: StepPlan, module: ItemPlan, places: RankPlaces, replica: int, *, length: int, align_tokens: int | None
) -> RouteTable:
    """The roads of one replica's ranks for one module.

    Args:
        plan: The step.
        module: The module's items.
        places: Of all ranks.
        replica: In [0, places.dp).
        length: Tokens of a sample.
        align_tokens: `slice_align` of the recipe's packing.
    """
    items, placement = module.items, plan.placement
    replica_of_item = placement.dp_rank_of_sample[items.sample]
    row_of_item = _rows_before(module)
    home_of_consumer = np.arange(module.num_consumers) * places.dp // module.num_consumers
    mine = (replica_of_item == replica) | (home_of_consumer[module.consumer_of_item] == replica)
    runs = _runs(plan, module, np.flatnonzero(mine), places.cp, length=length, align_tokens=align_tokens)
    roads = _roads(module, runs, replica_of_item, places)
    item = runs.item[roads.run]
    bin_of_road = module.bin_of_item[item]
    first_place = replica * places.replica_places
    rank_of_place = np.array(places.rank_of_place, np.int64)
    sample = items.sample[item]
    row = row_of_item[item] + runs.row_in_item[roads.run]
    microbatch = placement.microbatch_of_sample[sample]
    token = placement.slot_of_sample[sample] * (length // places.cp) + runs.token[roads.run]
    rows, returns = runs.rows[roads.run], roads.returns
    sends = [rank_of_place[roads.receiver], row, rows, returns]
    receives = [rank_of_place[roads.sender], microbatch, token, rows, returns]
    parts: list[tuple[Int32Array, Int64Array]] = []
    for ours, columns in ((roads.sender, sends), (roads.receiver, receives)):
        inside = np.flatnonzero((ours >= first_place) & (ours < first_place + places.replica_places))
        part = (ours[inside] - first_place) * module.num_bins + bin_of_road[inside]
        # Roads come in the order of items; those of one pair of ranks keep it on both sides.
        order = np.lexsort((inside, columns[0][inside], part))
        table = np.stack([column[inside[order]] for column in columns], axis=1).astype(np.int32)
        stop = np.searchsorted(part[order], np.arange(places.replica_places * module.num_bins), side="right")
        parts.append((table, stop.astype(np.int64)))
    return RouteTable(sends=parts[0][0], sends_stop=parts[0][1], receives=parts[1][0], receives_stop=parts[1][1])


def _rows_before(module: ItemPlan) -> Int64Array:
    """[n] the first row of each item among those of its consumer's bin."""
    place = module.consumer_of_item * module.num_bins + module.bin_of_item
    order = np.lexsort((module.slot_of_item, place))
    rows = module.items.tokens[order]
    before = np.cumsum(rows) - rows
    first = np.searchsorted(place[order], place[order])
    found = np.empty(len(order), np.int64)
    found[order] = before - (before[first] if len(first) else 0)
    return found


def _runs(
    plan: StepPlan, module: ItemPlan, chosen: Int64Array, cp: int, *, length: int, align_tokens: int | None
) -> _Runs:
    items = module.items
    offset, tokens = items.offset[chosen], items.tokens[chosen]
    if cp == 1:
        some = tokens > 0
        none = np.zeros(int(some.sum()), np.int64)
        return _Runs(chosen[some], none, none, offset[some], tokens[some])
    if align_tokens is None:
        begin, width = np.zeros_like(offset), np.full_like(offset, length)
    else:
        piece = items.piece[chosen]
        begin = plan.sample_offset[piece]
        width = -(-plan.pieces.tokens[piece] // align_tokens) * align_tokens
    chunk = width // (2 * cp)
    number = np.arange(2 * cp)  # chunks of the stretch; rank r takes chunks r and 2 cp - 1 - r
    chunk_start = begin[:, None] + chunk[:, None] * number
    start = np.maximum(chunk_start, offset[:, None])
    stop = np.minimum(chunk_start + chunk[:, None], (offset + tokens)[:, None])
    at, which = np.nonzero(stop > start)
    is_late = which >= cp
    in_slice = begin[at] // cp + is_late * chunk[at] + start[at, which] - chunk_start[at, which]
    return _Runs(
        item=chosen[at],
        cp_rank=np.where(is_late, 2 * cp - 1 - which, which),
        row_in_item=start[at, which] - offset[at],
        token=in_slice,
        rows=(stop - start)[at, which],
    )


class _Roads(NamedTuple):
    """A run of rows from one place to another; int64 [k], in order of runs."""

    run: Int64Array
    sender: Int64Array
    receiver: Int64Array
    returns: Int64Array


def _roads(module: ItemPlan, runs: _Runs, replica_of_item: Int64Array, places: RankPlaces) -> _Roads:
    """Every place that embeds tokens of a run receives it."""
    takes_tokens = np.array(places.takes_tokens)
    run, slots = np.divmod(np.arange(len(runs.item) * places.pp * places.tp), places.pp * places.tp)
    stage, tp_rank = np.divmod(slots, places.tp)
    item = runs.item[run]
    receiver = ((replica_of_item[item] * places.cp + runs.cp_rank[run]) * places.pp + stage) * places.tp + tp_rank
    does = takes_tokens[receiver]
    run, stage, tp_rank, receiver = run[does], stage[does], tp_rank[does], receiver[does]
    consumer = module.consumer_of_item[runs.item[run]]
    returns = np.ones(len(run), np.int64)
    if module.axis == "WORLD":
        sender, returns = consumer, (tp_rank == 0).astype(np.int64)
    elif module.axis == "CP":
        sender = (consumer * places.pp + stage) * places.tp + tp_rank
    else:
        sender = ((consumer * places.cp + runs.cp_rank[run]) * places.pp + stage) * places.tp + tp_rank
    return _Roads(run, sender, receiver, returns)
