"""What the ranks of a replica get of its modules, and the road of every row that a module gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.parallel.place_tree import Layout, RankPlaces
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.reader.protocol import StepItems
from torchmix.recipe.structs import Packing

# --- Where the items of a replica's microbatches stand, and how their tokens lie in them.
#
# Items come by microbatch and token. Cost: a few array operations, and 20 bytes an item for each rank.

PLACES = "places"
"""The table's name among the arrays of a module."""
CP_RANK = "cp_rank_of_rank"
"""Name of the array that says which CP slice each rank has, by which it knows where its tokens stand."""


def item_places(plan: StepPlan, module: ItemPlan, replica: int, of_sources: StepItems, *, length: int) -> Int32Array:
    """int32 [k, 7]: microbatch, first token in it at full length, tokens, their frames, rows and columns, or zeros, and
    the milliseconds that the frames last together, or 0.

    Args:
        plan: The step.
        module: A module of items in documents.
        replica: The replica whose texts have them.
        of_sources: Reads their items.
        length: Tokens of a sample.
    """
    items, placement = module.items, plan.placement
    chosen = np.flatnonzero(placement.dp_rank_of_sample[items.sample] == replica)
    sample = items.sample[chosen]
    source = plan.pieces.source[items.piece[chosen]]
    table = np.zeros((len(chosen), 7), np.int64)
    table[:, 0] = placement.microbatch_of_sample[sample]
    table[:, 1] = placement.slot_of_sample[sample] * length + items.offset[chosen]
    table[:, 2] = items.tokens[chosen]
    for number in np.unique(source).tolist():
        name = plan.sources[number]
        mine = np.flatnonzero(source == number)
        sizes = of_sources.table(name, module.unit).sizes
        grids = of_sources.modality(name, module.unit).grids(sizes, items.item[chosen[mine]])
        found = np.stack([grids.frames, grids.rows, grids.columns], axis=1)
        table[mine, 3:6] = found * (found.prod(axis=1) == table[mine, 2])[:, None]
        if grids.milliseconds is not None:
            table[mine, 6] = grids.milliseconds
    return table[np.lexsort((table[:, 1], table[:, 0]))].astype(np.int32)


# --- Plan -> the road of every row that a module gives: from the rank that computes it to those whose tokens it
# replaces.
#
# What rank a sends to rank b is, in this order, what b receives from a; each row reaches every rank that embeds its
# token, once. Cost: a few array operations a rank of the replica, over the items that it computes or embeds.
#
# A row travels between ranks of equal TP rank and stage where those compute the same items (axes DP and CP), else from
# the one rank that has it to all TP ranks; then gradients come back from the first of these alone, since all have the
# same. Under context parallelism the tokens of an item lie on several ranks, in runs, as `fields.py` cuts
# them.


class RouteTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The roads of one replica's ranks, by place in the replica and bin of the module."""

    sends: Int32Array
    """int32 [s, 4]: to which rank, the first of the sender's rows, how many, whether gradients come back this way."""
    sends_stop: Int64Array
    """[places x bins] where each part of `sends` ends."""
    receives: Int32Array
    """int32 [r, 5]: from which rank, for which microbatch, the first token in it, rows, whether gradients go back."""
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
        places: The places of all ranks.
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


# --- What the ranks of a replica get of its modules, as numpy arrays by name, and the cut for some of these ranks.
#
# A cut for some ranks has what these ranks compute, and their roads, and nothing else; a cut of a cut is the cut.
# Cost: copies of the values that are kept.
#
#     MODULE.consumer_of_rank  int64 [R]      which of the C consumers here each rank is, or belongs to; ranks that
#                                             embed no tokens, of the axes DP and CP, to a last one without items
#     MODULE.items_stop        int64 [C * N]  where the items of each consumer and bin end
#     MODULE.units             int32 [n]      units of each item: tokens of a document, patches of an image
#     MODULE.segments          int32 [n]      segments of each item, into which its units divide evenly
#     MODULE.rows              int32 [n]      rows that each item gives
#     MODULE.item/NAME         [n, ...]       other values of items: source, row, ...
#     MODULE.unit/NAME         [units, ...]   values of their units: tokens, pixels
#     MODULE.file/NAME         [bytes, ...]   files of items, of item/file_bytes [n] bytes each
#     MODULE.places            int32 [k, 6]   items in the texts of the replica, see `item_places`; not of documents
#     MODULE.cp_rank_of_rank   int64 [R]      which CP slice each rank has; beside places alone
#     MODULE.sends, MODULE.sends_stop, MODULE.receives, MODULE.receives_stop    see `routes.py`; stops are [R * N]
#
# R is ranks, C consumers, N bins: the microbatches of the step, or 1.

Arrays = Mapping[str, NDArray[Any]]


def items_of_replica(module: ItemPlan, layout: Layout, replica: int) -> Int64Array:
    """The items that consumers of a replica compute, by consumer, bin and slot."""
    width = layout.consumers_of_replica(module.axis)
    mine = np.flatnonzero(module.consumer_of_item // width == replica)
    order = np.lexsort((module.slot_of_item[mine], module.bin_of_item[mine], module.consumer_of_item[mine]))
    found: Int64Array = mine[order]
    return found


def items_of_leader(
    module: ItemPlan, layout: Layout, places: RankPlaces, replica: int, leader: int | None
) -> Int64Array:
    """As `items_of_replica`, the items of those consumers for whose ranks a leader reads; None reads for all."""
    mine = items_of_replica(module, layout, replica)
    if leader is None:
        return mine
    ranks = slice(replica * places.replica_places, (replica + 1) * places.replica_places)
    is_used = np.array(places.leader_of_place)[ranks] == leader
    if module.axis != "WORLD":
        is_used &= np.array(places.takes_tokens)[ranks]
    return mine[np.isin(module.consumer_of_item[mine], places.consumer_of_place(module.axis)[ranks][is_used])]


def arrays_of_module(
    plan: StepPlan,
    module: ItemPlan,
    routes: RouteTable,
    places: RankPlaces,
    replica: int,
    *,
    mine: Int64Array,
    values: Arrays,
) -> dict[str, NDArray[Any]]:
    """The arrays of one module for all ranks of a replica, without the module's name.

    Args:
        plan: The step.
        module: The module's items.
        routes: From `route_table` for the replica.
        places: The places of all ranks.
        replica: The replica.
        mine: Items, in the order of `items_of_replica`; consumers whose items are not among these have none.
        values: `units`, `segments`, `item/NAME` and `unit/NAME` of these.
    """
    consumers = places.consumer_of_place(module.axis)
    ranks = slice(replica * places.replica_places, (replica + 1) * places.replica_places)
    first = int(consumers[ranks][0])
    num_consumers = int(consumers[ranks][-1]) - first + 1
    place = (module.consumer_of_item[mine] - first) * module.num_bins + module.bin_of_item[mine]
    consumer_of_rank = consumers[ranks] - first
    if module.axis != "WORLD":  # rows of such a consumer are used where each of its ranks embeds tokens, and only there
        consumer_of_rank[~np.array(places.takes_tokens)[ranks]] = num_consumers
        num_consumers = int(consumer_of_rank.max()) + 1
    items, pieces = module.items, plan.pieces
    piece = items.piece[mine]
    return {
        "consumer_of_rank": consumer_of_rank,
        "items_stop": np.searchsorted(place, np.arange(num_consumers * module.num_bins), side="right").astype(np.int64),
        "rows": items.tokens[mine].astype(np.int32),
        "item/source": pieces.source[piece].astype(np.int32),
        "item/row": pieces.row[piece],
        "item/number": items.item[mine],
        **values,
        "sends": routes.sends,
        "sends_stop": routes.sends_stop,
        "receives": routes.receives,
        "receives_stop": routes.receives_stop,
    }


def module_names(arrays: Mapping[str, Any]) -> list[str]:
    """Names of the modules in arrays by `MODULE.ARRAY`, in order."""
    return list(dict.fromkeys(name.partition(".")[0] for name in arrays))


def of_module(arrays: Mapping[str, NDArray[Any]], module: str) -> dict[str, NDArray[Any]]:
    """The arrays of one module, without its name."""
    prefix = f"{module}."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def cut_for_ranks(arrays: Arrays, ranks: Sequence[int]) -> dict[str, NDArray[Any]]:
    """What some ranks of the replica get, for all modules.

    Args:
        arrays: By `MODULE.ARRAY`.
        ranks: Numbers of the ranks in these arrays, in the order in which the cut lists them.
    """
    cut: dict[str, NDArray[Any]] = {}
    for module in module_names(arrays):
        cut |= {f"{module}.{name}": array for name, array in _cut(of_module(arrays, module), ranks).items()}
    return cut


def _cut(arrays: Arrays, ranks: Sequence[int]) -> dict[str, NDArray[Any]]:
    chosen, consumer_of_rank = np.unique(arrays["consumer_of_rank"][list(ranks)], return_inverse=True)
    num_consumers = int(arrays["consumer_of_rank"].max()) + 1
    num_bins = len(arrays["items_stop"]) // num_consumers
    has_all = len(chosen) == num_consumers  # as where TP ranks are one consumer: nothing is copied
    items, items_stop = _parts(arrays["items_stop"], chosen, num_bins)
    cut: dict[str, NDArray[Any]] = {
        "consumer_of_rank": consumer_of_rank.astype(np.int64),
        "items_stop": items_stop,
    }
    units, _ = _parts(np.cumsum(arrays["units"], dtype=np.int64), items, 1)
    for name, array in arrays.items():
        is_of_items = name in ("units", "segments", "rows") or name.startswith("item/")
        if has_all and (is_of_items or name.startswith(("unit/", "file/"))):
            cut[name] = array
        elif is_of_items:
            cut[name] = array[items]
        elif name.startswith("unit/"):
            cut[name] = array[units]
        elif name.startswith("file/"):
            cut[name] = array[_parts(np.cumsum(arrays["item/file_bytes"], dtype=np.int64), items, 1)[0]]
        elif name == PLACES:
            cut[name] = array
        elif name == CP_RANK:
            cut[name] = array[list(ranks)]
    for name in ("sends", "receives"):
        roads, stop = _parts(arrays[f"{name}_stop"], np.array(ranks, np.int64), num_bins)
        cut[name], cut[f"{name}_stop"] = arrays[name][roads], stop
    return cut


def _parts(stop: Int64Array, chosen: Int64Array, width: int) -> tuple[Int64Array, Int64Array]:
    """Entries of some parts of an array, and where the parts of these entries end.

    Args:
        stop: Where each part ends, `width` parts side by side for each number.
        chosen: Numbers.
        width: Parts of a number.
    """
    part = (chosen[:, None] * width + np.arange(width)).reshape(-1)
    start = np.concatenate([np.zeros(1, np.int64), stop])[part]
    count = stop[part] - start
    ends = np.cumsum(count)
    return np.arange(count.sum()) + np.repeat(start - (ends - count), count), ends
