"""How a global batch is laid out on its consumers.

In: data-parallel ranks, and samples of a microbatch. Out: how many microbatches each rank has in a step, and how many
consumers a module has. Must hold: the samples of every step divide. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchmix.errors import TopologyError

GridAxis = Literal["DP", "CP", "WORLD"]
"""Who consumes: each replica, each replica's slice of the sequence, or each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The grid that samples of a step are placed on: `dp` ranks, each with as many microbatches."""

    dp: int = 1
    """Data-parallel ranks, 1 or more."""
    micro_batch_size: int = 1
    """Samples of a microbatch, 1 or more."""
    tp: int = field(default=1, compare=False)
    """Tensor-parallel ranks. This size and the next two matter to modules alone, not to samples."""
    cp: int = field(default=1, compare=False)
    """Context-parallel ranks."""
    pp: int = field(default=1, compare=False)
    """Pipeline stages."""
    broadcast_at: Literal["TP"] | None = field(default=None, compare=False)
    """The axis along which the trainer sends what the first rank gets."""

    def __str__(self) -> str:
        return f"dp {self.dp} x micro_batch_size {self.micro_batch_size}"

    def consumers_of_replica(self, axis: GridAxis) -> int:
        """Consumers of one replica at an axis; they are numbered by replica, CP slice, stage and TP rank."""
        return {"DP": 1, "CP": self.cp, "WORLD": self.cp * self.pp * self.tp}[axis]

    @property
    def row_samples(self) -> int:
        """Samples of one microbatch of all ranks."""
        return self.dp * self.micro_batch_size

    def num_microbatches(self, num_samples: int) -> int:
        """Microbatches of each rank in a step.

        Raises:
            TopologyError: `num_samples` is not a multiple of `row_samples`.
        """
        count, rest = divmod(num_samples, self.row_samples)
        if rest:
            near = " or ".join(str(n * self.row_samples) for n in (count, count + 1) if n)
            raise TopologyError(
                f"a global batch of {num_samples} samples does not divide by {self} = {self.row_samples}; choose sizes "
                f"that divide it, or batch.samples {near} (another order)"
            )
        return count
