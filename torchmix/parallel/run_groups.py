"""Process groups of the runs of ranks that share documents, for attention over a microbatch's own context parallelism.

A run is some neighbours of DP x CP at one stage and one TP rank, aligned to their number. Groups are of the job's own
backend, for its training thread. All ranks create all groups in one order, as `groups.py` says why. Cost: less than
twice as many groups as there are ranks of DP x CP, once for each stage and TP rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch.distributed as dist

from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import ClientPlaceTree, powers_up_to
from torchmix.parallel.topology import Topology


class ContextGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The ranks that share documents with this one."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of their slices."""
    index: int
    """The slice of this rank, in [0, len(ranks))."""
    group: dist.ProcessGroup | None
    """Their process group; None where this rank is alone."""

    @property
    def place_of_slice(self) -> tuple[int, ...]:
        """Where each slice is among what a collective of the group gathers: torch orders a group by global rank."""
        ordered = sorted(self.ranks)
        return tuple(ordered.index(rank) for rank in self.ranks)


class ContextGroups:
    """By `microbatch.cp_ranks`, the group of each run that this rank may be of."""

    def __init__(self, groups: Mapping[range, ContextGroup]) -> None:
        """Use `context_groups`."""
        self._groups = dict(groups)

    def __getitem__(self, cp_ranks: range) -> ContextGroup:
        """The group of a microbatch.

        Raises:
            TopologyError: No group was made for runs of this size.
        """
        if cp_ranks not in self._groups:
            sizes = sorted({len(run) for run in self._groups})
            raise TopologyError(
                f"ranks {cp_ranks.start} to {cp_ranks.stop - 1} of DP x CP share a microbatch, and there are groups "
                f"of {sizes} ranks alone; give context_groups the sizes of balance.context, or none"
            )
        return self._groups[cp_ranks]


def context_groups(tree: ClientPlaceTree | Topology, sizes: Sequence[int] | None = None) -> ContextGroups:
    """Make the groups of all runs of ranks. A collective: every rank of the job calls it, with the same arguments.

    Args:
        tree: The job's places, as this rank sees them.
        sizes: `balance.context.sizes` of the recipe; None: those of `auto`, the powers of two below dp x cp, and that
            number. Sizes above it are left out, as in the plan.

    Raises:
        TopologyError: A size does not divide the next one, or the job has several ranks and torch.distributed is not
            initialised.
    """
    topology = tree.topology if isinstance(tree, ClientPlaceTree) else tree
    num_ranks = topology.dp * topology.cp
    wanted = sorted({1, *(powers_up_to(num_ranks) if sizes is None else (size for size in sizes if size <= num_ranks))})
    if wanted[0] < 1:
        raise TopologyError(f"context_groups: sizes {list(sizes or ())} have one below 1")
    if topology.world_size > 1 and not dist.is_initialized():
        raise TopologyError("context_groups: initialise torch.distributed first, the job has several ranks")
    mine, place = topology.coordinates, topology.coordinates.dp * topology.cp + topology.coordinates.cp
    found: dict[range, ContextGroup] = {}
    for size in wanted:
        for first in range(0, num_ranks - size + 1, size):
            run = range(first, first + size)
            for stage in range(topology.pp):
                for tp in range(topology.tp):
                    ranks = tuple(
                        topology.rank_at(tp=tp, cp=at % topology.cp, dp=at // topology.cp, pp=stage) for at in run
                    )
                    group = dist.new_group(list(ranks)) if size > 1 else None
                    if place in run and (stage, tp) == (mine.pp, mine.tp):
                        found[run] = ContextGroup(ranks=ranks, index=place - first, group=group)
    return ContextGroups(found)
