"""Where every rank of a job stands, as plain values that a worker process can be given.

In: a place tree. Out: `RankPlaces`. Must hold: a *place* numbers ranks by replica, CP slice, stage and TP rank, in this
order, whatever the ranks' own numbers are; a consumer at an axis is a run of places. Cost: some bytes a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import TopologyError
from torchmix.parallel.layout import GridAxis, Layout
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.recipe.balance.structs import Module


class RankPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a job, its ranks by place, and which of them embed tokens."""

    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1
    rank_of_place: tuple[int, ...] = (0,)
    """[dp * cp * pp * tp] global rank at each place."""
    takes_tokens: tuple[bool, ...] = (True,)
    """[dp * cp * pp * tp] whether the rank at a place gets tokens, and so needs the rows that replace embeddings."""

    @classmethod
    def of_tree(cls, tree: ClientPlaceTree) -> RankPlaces:
        """The places of all ranks of a place tree."""
        sizes = tree.topology
        ranks = [bucket[0] for bucket in tree.buckets("TP")]
        return cls(
            dp=sizes.dp,
            cp=sizes.cp,
            pp=sizes.pp,
            tp=sizes.tp,
            rank_of_place=tuple(ranks),
            takes_tokens=tuple(tree.role_of_rank[rank].is_first_stage for rank in ranks),
        )

    @property
    def replica_places(self) -> int:
        """Places of one replica."""
        return self.cp * self.pp * self.tp

    @property
    def cp_rank_of_replica(self) -> Int64Array:
        """int64 [replica_places] the CP slice of each place of a replica."""
        return np.arange(self.replica_places) // (self.pp * self.tp)

    def consumer_of_place(self, axis: GridAxis) -> Int64Array:
        """int64 [places] the consumer that each place belongs to at an axis."""
        width = {"DP": self.replica_places, "CP": self.pp * self.tp, "WORLD": 1}[axis]
        return np.arange(self.dp * self.replica_places) // width


ONE_PLACE = RankPlaces()
"""A job of one rank."""


def places_in_replica(tree: ClientPlaceTree) -> dict[int, int]:
    """Place in the replica of each rank of this process' replica, by global rank."""
    ranks = [
        rank for rank in (bucket[0] for bucket in tree.buckets("TP")) if tree.replica_of_rank[rank] == tree.replica
    ]
    return {rank: place for place, rank in enumerate(ranks)}


def check_scopes(modules: Mapping[str, Module], tree: ClientPlaceTree) -> None:
    """Refuse modules whose rows would have to travel inside the schedule of a pipeline.

    Raises:
        TopologyError: A module has `scope: microbatch`, and the job has several stages.
    """
    for name, module in modules.items():
        if module.scope == "microbatch" and tree.topology.pp > 1:
            raise TopologyError(
                f"modules.{name}.scope is microbatch, and the job has {tree.topology.pp} pipeline stages: an exchange "
                f"between their microbatches would wait for ever; write scope: step, or use pp=1"
            )


def layout_of(tree: ClientPlaceTree, *, micro_batch_size: int, broadcast_at: Literal["TP"] | None = None) -> Layout:
    """The grid of a job that samples and items are placed on."""
    sizes = tree.topology
    return Layout(
        dp=sizes.dp,
        micro_batch_size=micro_batch_size,
        tp=sizes.tp,
        cp=sizes.cp,
        pp=sizes.pp,
        broadcast_at=broadcast_at,
    )
