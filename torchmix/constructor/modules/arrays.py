"""What the ranks of a replica get of its modules, as numpy arrays by name, and the cut for some of these ranks.

In: a plan, the values that were read for the items. Out: arrays by the name `MODULE.ARRAY`, beside those of a step.
Must hold: a share for some ranks has what these ranks compute, and their roads, and nothing else; a cut of a cut is the
cut. Cost: copies of the values that are kept.

    MODULE.consumer_of_rank  int64 [R]      which of the C consumers here each rank is, or belongs to
    MODULE.items_stop        int64 [C * N]  where the items of each consumer and bin end
    MODULE.units             int32 [n]      units of each item: tokens of a document, patches of an image
    MODULE.rows              int32 [n]      rows that each item gives
    MODULE.item/NAME         [n, ...]       other values of items: source, row, ...
    MODULE.unit/NAME         [units, ...]   values of their units: tokens, pixels
    MODULE.file/NAME         [bytes, ...]   files of items, of item/file_bytes [n] bytes each
    MODULE.images            int32 [k, 5]   images in the texts of the replica, see `image_places.py`; of images alone
    MODULE.cp_rank_of_rank   int64 [R]      which CP slice each rank has; beside images alone
    MODULE.sends, MODULE.sends_stop, MODULE.receives, MODULE.receives_stop    see `routes.py`; stops are [R * N]

R is ranks, C consumers, N bins: the microbatches of the step, or 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.constructor.modules.image_places import CP_RANK
from torchmix.constructor.modules.image_places import NAME as IMAGES
from torchmix.constructor.modules.routes import RouteTable
from torchmix.parallel.layout import Layout
from torchmix.parallel.modules.rank_places import RankPlaces
from torchmix.planner.plan import ItemPlan, StepPlan

Arrays = Mapping[str, NDArray[Any]]


def items_of_replica(module: ItemPlan, layout: Layout, replica: int) -> Int64Array:
    """The items that consumers of a replica compute, by consumer, bin and slot."""
    width = layout.consumers_of_replica(module.axis)
    mine = np.flatnonzero(module.consumer_of_item // width == replica)
    order = np.lexsort((module.slot_of_item[mine], module.bin_of_item[mine], module.consumer_of_item[mine]))
    found: Int64Array = mine[order]
    return found


def arrays_of_module(
    plan: StepPlan,
    module: ItemPlan,
    routes: RouteTable,
    places: RankPlaces,
    replica: int,
    *,
    values: Arrays,
) -> dict[str, NDArray[Any]]:
    """The arrays of one module for all ranks of a replica, without the module's name.

    Args:
        plan: The step.
        module: The module's items.
        routes: From `route_table` for the replica.
        places: Of all ranks.
        replica: The replica.
        values: `units`, `item/NAME` and `unit/NAME` of the items in the order of `items_of_replica`.
    """
    mine = items_of_replica(module, plan.layout, replica)
    consumers = places.consumer_of_place(module.axis)
    ranks = slice(replica * places.replica_places, (replica + 1) * places.replica_places)
    first = int(consumers[ranks][0])
    num_consumers = int(consumers[ranks][-1]) - first + 1
    place = (module.consumer_of_item[mine] - first) * module.num_bins + module.bin_of_item[mine]
    items, pieces = module.items, plan.pieces
    piece = items.piece[mine]
    return {
        "consumer_of_rank": consumers[ranks] - first,
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
    """The share of some ranks of the replica, for all modules.

    Args:
        arrays: By `MODULE.ARRAY`.
        ranks: Numbers of the ranks in these arrays, in the order in which the share lists them.
    """
    cut: dict[str, NDArray[Any]] = {}
    for module in module_names(arrays):
        cut |= {f"{module}.{name}": array for name, array in _cut(of_module(arrays, module), ranks).items()}
    return cut


def _cut(arrays: Arrays, ranks: Sequence[int]) -> dict[str, NDArray[Any]]:
    chosen, consumer_of_rank = np.unique(arrays["consumer_of_rank"][list(ranks)], return_inverse=True)
    num_consumers = int(arrays["consumer_of_rank"].max()) + 1
    num_bins = len(arrays["items_stop"]) // num_consumers
    items, items_stop = _parts(arrays["items_stop"], chosen, num_bins)
    cut: dict[str, NDArray[Any]] = {
        "consumer_of_rank": consumer_of_rank.astype(np.int64),
        "items_stop": items_stop,
    }
    units, _ = _parts(np.cumsum(arrays["units"], dtype=np.int64), items, 1)
    for name, array in arrays.items():
        if name in ("units", "rows") or name.startswith("item/"):
            cut[name] = array[items]
        elif name.startswith("unit/"):
            cut[name] = array[units]
        elif name.startswith("file/"):
            cut[name] = array[_parts(np.cumsum(arrays["item/file_bytes"], dtype=np.int64), items, 1)[0]]
        elif name == IMAGES:
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
