"""What maps give beside ids, as tensors of one microbatch.

In: the arrays of a step, see `row_arrays.py`. Out: `RowLists` by the maps' names for them, of each microbatch. Must
hold: the same on all ranks of a replica, whatever their stage and CP slice. Cost: views.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from torchmix.constructor.row_arrays import PARTS, SEPARATOR, names_of_rows


class RowLists(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Lists of numbers of the rows that begin in a microbatch; there may be none."""

    values: torch.Tensor
    """[v] the numbers of all rows, end to end; of the map's type, unsigned ones beyond uint8 as the next signed one."""
    lengths: torch.Tensor
    """int64 [k] how many each row has."""
    places: torch.Tensor
    """int64 [k] the row's first token among the micro_batch_size * length tokens, ascending; before any CP slice."""

    def rows(self) -> list[torch.Tensor]:
        """The numbers of each row."""
        return list(self.values.split_with_sizes(self.lengths.tolist()))

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> RowLists:
        """The same on another device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking) for name in ("values", "lengths", "places")
        }
        return RowLists(**moved)


def rows_of_microbatches(tensors: Mapping[str, torch.Tensor], num_microbatches: int) -> list[dict[str, RowLists]]:
    """The lists of each microbatch, by name.

    Args:
        tensors: By `NAME:PART`.
        num_microbatches: M of the step.
    """
    found: list[dict[str, RowLists]] = [{} for _ in range(num_microbatches)]
    for name in names_of_rows(tensors):
        values, lengths, places, stop = (tensors[f"{name}{SEPARATOR}{part}"] for part in PARTS)
        counts = stop.diff(prepend=stop.new_zeros(1)).tolist()
        lengths_of, places_of = lengths.split_with_sizes(counts), places.split_with_sizes(counts)
        values_of = values.split_with_sizes([int(one.sum()) for one in lengths_of])
        for index, parts in enumerate(zip(values_of, lengths_of, places_of, strict=True)):
            found[index][name] = RowLists(values=parts[0], lengths=parts[1], places=parts[2])
    return found
