"""What a rank computes of a module in a microbatch, or in a whole step, as tensors.

In: the arrays of one rank, see `arrays.py`. Out: `ModuleBatch`. Must hold: items are in one order in all of its
tensors, and the module's output has their rows in this order. Cost: views; boundaries are summed at first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from torchmix.constructor.modules.arrays import cut_for_ranks, module_names, of_module
from torchmix.constructor.modules.image_places import CP_RANK
from torchmix.constructor.modules.image_places import NAME as IMAGES
from torchmix.parallel.modules.route import Routes


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleBatch:
    """The items of one module that one rank computes together; there may be none."""

    units: torch.Tensor
    """int32 [n] units of each item: tokens of a document, patches of an image."""
    rows: torch.Tensor
    """int32 [n] rows that the module gives for each item."""
    arrays: Mapping[str, torch.Tensor]
    """By name: per item `source`, `row` and `number`, of documents also `start`; per unit `tokens` of documents."""
    routes: Routes
    """Where the rows go, for `torchmix.parallel.route`."""
    images: torch.Tensor | None = None
    """int32 [k, 5] images in the texts of this replica's step, see `mrope.COLUMNS`; None where items are documents."""
    cp_rank: int = 0
    """This rank's CP slice, where items are images."""
    _moved: dict[str, ModuleBatch] = field(default_factory=dict, repr=False)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32, 0 and cumulative units: the segments within which units attend to each other.

        A segment is an item, [n + 1]. An image has a segment for each tile or frame that `grid_thw` counts.
        """
        grid = self.arrays.get("grid_thw")
        if grid is None:
            return _cumulative(self.units)
        return _cumulative((grid[:, 1] * grid[:, 2]).repeat_interleave(grid[:, 0]))

    @cached_property
    def cu_rows(self) -> torch.Tensor:
        """int32 [n + 1], 0 and cumulative rows of the output."""
        return _cumulative(self.rows)

    @cached_property
    def max_seqlen(self) -> int:
        """Units of the largest segment; 0 without items."""
        return int(self.cu_seqlens.diff().max()) if len(self.units) else 0

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> ModuleBatch:
        """The same on another device; routes stay on the CPU. Batches of a whole step are moved once."""
        key = str(device)
        if key not in self._moved:

            def moved(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(device, non_blocking=non_blocking)

            arrays = {name: moved(tensor) for name, tensor in self.arrays.items()}
            self._moved[key] = replace(self, units=moved(self.units), rows=moved(self.rows), arrays=arrays, _moved={})
        return self._moved[key]


def modules_of_microbatches(tensors: Mapping[str, torch.Tensor], num_microbatches: int) -> list[dict[str, ModuleBatch]]:
    """The modules of each microbatch of one rank; those of a whole step are the same object in all of them.

    Args:
        tensors: By `MODULE.ARRAY`, of one rank.
        num_microbatches: M of the step.
    """
    found: list[dict[str, ModuleBatch]] = [{} for _ in range(num_microbatches)]
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for module in module_names(tensors):
        mine = {name: tensors[f"{module}.{name}"] for name in of_module(arrays, module)}
        assert len(mine["consumer_of_rank"]) == 1, "a rank's own share"
        batches = _batches(mine)
        for index, modules in enumerate(found):
            modules[module] = batches[index if len(batches) > 1 else 0]
    return found


def share_of_ranks(tensors: Mapping[str, torch.Tensor], ranks: list[int]) -> dict[str, torch.Tensor]:
    """`cut_for_ranks` on tensors; nothing is copied where the share is all there is."""
    if not tensors:
        return {}
    names = [name for name in tensors if name.endswith(".consumer_of_rank")]
    if all(ranks == list(range(len(tensors[name]))) for name in names):
        return dict(tensors)
    cut = cut_for_ranks({name: tensor.numpy() for name, tensor in tensors.items()}, ranks)
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in cut.items()}


def modules_by_sharing(
    tensors: Mapping[str, torch.Tensor], ranks: list[int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The arrays of modules of which all these ranks compute the same items, and those of the others."""
    joint: dict[str, torch.Tensor] = {}
    single: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        consumers = tensors[f"{name.partition('.')[0]}.consumer_of_rank"][ranks]
        (joint if bool((consumers == consumers[0]).all()) else single)[name] = tensor
    return joint, single


def _batches(tensors: Mapping[str, torch.Tensor]) -> list[ModuleBatch]:
    items_stop = tensors["items_stop"].tolist()
    units = torch.cat([tensors["units"].new_zeros(1, dtype=torch.int64), tensors["units"].cumsum(0)])
    roads_stop = {name: [0, *tensors[f"{name}_stop"].tolist()] for name in ("sends", "receives")}
    batches, images = [], tensors.get(IMAGES)
    cp_rank = int(tensors[CP_RANK]) if CP_RANK in tensors else 0
    for number, (start, stop) in enumerate(zip([0, *items_stop[:-1]], items_stop, strict=True)):
        first, last = int(units[start]), int(units[stop])
        arrays = {name[5:]: tensor[start:stop] for name, tensor in tensors.items() if name.startswith("item/")}
        arrays |= {name[5:]: tensor[first:last] for name, tensor in tensors.items() if name.startswith("unit/")}
        rows = tensors["rows"][start:stop]
        sends, receives = (tensors[name][stops[number] : stops[number + 1]] for name, stops in roads_stop.items())
        routes = Routes(sends=sends, receives=receives, num_rows=int(rows.sum()))
        batches.append(
            ModuleBatch(
                units=tensors["units"][start:stop],
                rows=rows,
                arrays=arrays,
                routes=routes,
                images=images,
                cp_rank=cp_rank,
            )
        )
    return batches


def _cumulative(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
