"""Who shares what at each axis of the job, and who leads: the ClientPlaceTree of MegaScale-Data (section 4.1)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import TopologyError
from torchmix.parallel.topology import (
    CP_DIM,
    DP_DIMS,
    PP_DIM,
    TP_DIM,
    Coordinates,
    DeviceMesh,
    MeshDims,
    Topology,
    topology_of_mesh,
)
from torchmix.recipe.build import nearest
from torchmix.recipe.structs import Module

# --- How a global batch is laid out on its consumers.
#
# The samples of every step divide, or masked ones fill what is left of the last microbatch.

GridAxis = Literal["DP", "CP", "WORLD"]
"""Who consumes: each replica, each replica's slice of the sequence, or each rank."""
BroadcastAxis = Literal["TP", "CP", "PP"]
"""Along which a trainer may send what it gets."""


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
    broadcast_at: BroadcastAxis | None = field(default=None, compare=False)
    """The axis along which the trainer sends what the first rank gets."""
    elastic: bool = field(default=False, compare=False)
    """Whether masked samples may fill the last microbatch; else the samples of every step must divide."""

    def __str__(self) -> str:
        return f"dp {self.dp} x micro_batch_size {self.micro_batch_size}"

    def consumers_of_replica(self, axis: GridAxis) -> int:
        """Consumers of one replica at an axis; they are numbered by replica, CP slice, stage and TP rank."""
        return {"DP": 1, "CP": self.cp, "WORLD": self.cp * self.pp * self.tp}[axis]

    @property
    def row_samples(self) -> int:
        """Samples of one microbatch of all ranks."""
        return self.dp * self.micro_batch_size

    def num_places(self, num_samples: int) -> int:
        """Samples of a step, with the masked ones that fill the last microbatch; errors as `num_microbatches`."""
        return self.num_microbatches(num_samples) * self.row_samples

    def num_microbatches(self, num_samples: int) -> int:
        """Microbatches of each rank in a step.

        Raises:
            TopologyError: `num_samples` is not a multiple of `row_samples`, and the layout is not elastic.
        """
        count, rest = divmod(num_samples, self.row_samples)
        if rest and self.elastic:
            return count + 1
        if rest:
            near = " or ".join(str(n * self.row_samples) for n in (count, count + 1) if n)
            raise TopologyError(
                f"a global batch of {num_samples} samples does not divide by {self} = {self.row_samples}; choose sizes "
                f"that divide it, or batch.samples {near} (another order), or say elastic: masked samples fill the "
                f"last microbatch"
            )
        return count


def powers_up_to(num_ranks: int) -> tuple[int, ...]:
    """The powers of two below a number of ranks, and that number: how many ranks may share a document by default."""
    return (*(1 << bit for bit in range(num_ranks.bit_length()) if 1 << bit < num_ranks), num_ranks)


# --- Which ranks read, and for whom: one leader a replica, one in each node of a replica, or one for each stage of
# it.
#
# A leader is of the replica of the ranks that it serves, and leads itself; every rank gets the same answer. Cost:
# O(ranks) integers.
#
#     "replica"   one read a replica; its exchange may cross nodes
#     "node"      one read a replica and node: what is sent stays in the node, and groups are smaller
#     "stage"     one read a replica and pipeline stage: no stage waits for another one's leader
#     a map       rank -> its leader, for ranks that "replica" would not give it
#
# Each further leader plans its replica's step, and reads all texts of it, without items that its ranks do not compute.
# It pays that in memory and reading, and its peers wait for fewer ranks. The leader of a middle stage reads no text:
# what its ranks get follows from the plan.

LeaderChoice = Literal["replica", "node", "stage"]
Leaders: TypeAlias = LeaderChoice | Mapping[int, int]


def leaders_of(topology: Topology, leaders: Leaders, *, ranks_per_node: int | None) -> tuple[int, ...]:
    """The leader of each rank, int [world_size].

    Args:
        topology: The job.
        leaders: What was chosen, as above.
        ranks_per_node: Ranks of every node, numbered node by node, for "node"; None takes LOCAL_WORLD_SIZE, which
            torchrun sets.

    Raises:
        TopologyError: The choice is unknown, the ranks of a node are not known or do not divide the job, or the map
            names a rank that does not exist, or a leader of another replica, or one that another rank leads.
    """
    places = [topology.coordinates_of(rank) for rank in range(topology.world_size)]
    if isinstance(leaders, Mapping):
        leader_of_rank = [topology.rank_at(dp=place.dp) for place in places]
        for rank, leader in leaders.items():
            check_rank(rank, topology, where="leaders")
            check_rank(leader, topology, where="leaders")
            leader_of_rank[rank] = leader
        _check_map(leader_of_rank, [place.dp for place in places])
        return tuple(leader_of_rank)
    if leaders not in get_args(LeaderChoice):
        raise TopologyError(
            f"leaders={leaders!r} is not one of {', '.join(get_args(LeaderChoice))}"
            f"{nearest(leaders, get_args(LeaderChoice))}, nor a map from a rank to its leader"
        )
    size = _ranks_per_node(topology, ranks_per_node) if leaders == "node" else 1
    part_of_rank = [
        (place.dp, {"replica": 0, "node": rank // size, "stage": place.pp}[leaders])
        for rank, place in enumerate(places)
    ]
    leader_of_part: dict[tuple[int, int], int] = {}
    for rank in sorted(range(len(places)), key=lambda rank: (places[rank].pp, places[rank].cp, places[rank].tp)):
        leader_of_part.setdefault(part_of_rank[rank], rank)
    return tuple(leader_of_part[part] for part in part_of_rank)


def check_rank(rank: int, topology: Topology, *, where: str) -> None:
    """Refuse the number of a rank that the job does not have.

    Raises:
        TopologyError: With the ranks that there are.
    """
    if not 0 <= rank < topology.world_size:
        raise TopologyError(f"{where}: there is no rank {rank}; the job has ranks 0 to {topology.world_size - 1}")


def _check_map(leader_of_rank: list[int], replica_of_rank: list[int]) -> None:
    for rank, leader in enumerate(leader_of_rank):
        replica = replica_of_rank[rank]
        if replica_of_rank[leader] != replica:
            members = [member for member, other in enumerate(replica_of_rank) if other == replica]
            raise TopologyError(
                f"leaders: rank {leader} belongs to replica {replica_of_rank[leader]} and cannot lead rank {rank} of "
                f"replica {replica}; choose one of {members}"
            )
        if leader_of_rank[leader] != leader:
            raise TopologyError(
                f"leaders: rank {leader} leads rank {rank}, but its own leader is rank {leader_of_rank[leader]}; map "
                f"{leader} to {leader} too, and each rank that it should lead"
            )


def _ranks_per_node(topology: Topology, ranks_per_node: int | None) -> int:
    text = str(ranks_per_node) if ranks_per_node is not None else os.environ.get("LOCAL_WORLD_SIZE", "")
    size = int(text) if text.isdigit() else 0
    if not size or topology.world_size % size:
        raise TopologyError(
            f'leaders="node" with {text or "unknown"} ranks a node, in a job of {topology.world_size} ranks: give '
            "ranks_per_node, a divisor of the job, or start the job with torchrun, which sets LOCAL_WORLD_SIZE; where "
            "nodes differ, give a map from each rank to its leader"
        )
    return size


# --- Who shares what at each axis of the job, and who leads: the ClientPlaceTree of MegaScale-Data (section 4.1).
#
# The levels below the root are the axes in the order in which they divide the data, which is not the order of ranks:
#
#     DP      other samples than the next bucket                dp buckets of tp*cp*pp ranks, the replicas
#     CP      the same samples, another slice of the sequence   dp*cp buckets of tp*pp ranks
#     PP      the same slice, the tensors of one stage          dp*cp*pp buckets of tp ranks
#     TP      identical content                                 the leaves, one rank each; "WORLD" names the same level
#
# A *leader* plans, fetches and builds one replica's steps for its *peers*: the other ranks of the replica, or those of
# them in its node or stage, where a replica has several leaders (`place_tree.py`). A *role* (stage and CP slice)
# names what a rank receives: ranks of one replica and role, the TP peers, receive identical bytes.
#
# Invariants: each rank has one leader, which is of its replica and leads itself; each rank has one role; every rank of
# the job that builds the tree from the same arguments gets the same tree. Cost: O(world size) integers, no torch, no
# communication.

Stage = Literal["only", "first", "middle", "last"]
Axis = Literal["WORLD", "DP", "CP", "PP", "TP"]


class Role(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """What a rank receives of its replica's global batch."""

    stage: Stage
    """Pipeline stage: "only" when there is one, else "first", "middle" (no sequence tensors) or "last"."""
    cp_rank: int
    """Slice of the sequence, in [0, cp)."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this role feeds the embedding: it needs tokens and position_ids."""
        return self.stage in ("only", "first")

    @property
    def is_last_stage(self) -> bool:
        """Whether this role computes the loss: it needs labels and loss_mask."""
        return self.stage in ("only", "last")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientPlaceTree:
    """The places of all ranks of a job; `from_topology`, `from_device_mesh` and `from_replicas` build it."""

    topology: Topology
    """Sizes of the axes and the rank this process is."""
    leader_of_rank: tuple[int, ...]
    """[world_size] global rank that reads for each rank; its own for a leader."""
    replica_of_rank: tuple[int, ...]
    """[world_size] replica of each rank."""
    role_of_rank: tuple[Role, ...]
    """[world_size] role of each rank."""
    leaders: tuple[int, ...]
    """Global ranks of the leaders, by replica, then rank."""
    _ranks_of_place: Mapping[tuple[int, Role], tuple[int, ...]] = field(repr=False, compare=False)
    """(leader, role) -> the ranks that the leader serves in this role, itself included."""

    @classmethod
    def from_topology(
        cls,
        topology: Topology,
        *,
        leaders: Leaders = "replica",
        ranks_per_node: int | None = None,
        roles: Mapping[int, Role] | None = None,
    ) -> ClientPlaceTree:
        """Infer the tree from the parallel sizes, then apply what the user overrides.

        Args:
            topology: The job.
            leaders: Who reads: one rank a "replica" (the one at tp = cp = pp = 0), one in each "node" of a replica, one
                for each "stage" of it, or a map from global ranks to their leaders, for those ranks whose leader is not
                that of "replica".
            ranks_per_node: Ranks of every node, for leaders of nodes; None takes torchrun's LOCAL_WORLD_SIZE.
            roles: Global rank -> its role, for those ranks that need other tensors than their stage says (say, a middle
                stage that predicts several tokens and needs labels).

        Raises:
            TopologyError: An override names a rank or a CP slice that does not exist, or a leader from another replica;
                or the nodes are not known.
        """
        places = [topology.coordinates_of(rank) for rank in range(topology.world_size)]
        replica_of_rank = tuple(place.dp for place in places)
        leader_of_rank = leaders_of(topology, leaders, ranks_per_node=ranks_per_node)
        role_of_rank = [_role_of(place, num_stages=topology.pp) for place in places]
        for rank, role in (roles or {}).items():
            check_rank(rank, topology, where="roles")
            if not 0 <= role.cp_rank < topology.cp:
                raise TopologyError(f"roles: rank {rank} has cp_rank {role.cp_rank}, but cp is {topology.cp}")
            role_of_rank[rank] = role
        ranks_of_place: dict[tuple[int, Role], list[int]] = {}
        for rank, place in enumerate(zip(leader_of_rank, role_of_rank, strict=True)):
            ranks_of_place.setdefault(place, []).append(rank)
        return cls(
            topology=topology,
            leader_of_rank=leader_of_rank,
            leaders=tuple(sorted(set(leader_of_rank), key=lambda rank: (replica_of_rank[rank], rank))),
            replica_of_rank=replica_of_rank,
            role_of_rank=tuple(role_of_rank),
            _ranks_of_place={place: tuple(ranks) for place, ranks in ranks_of_place.items()},
        )

    @classmethod
    def from_device_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        dp: MeshDims = DP_DIMS,
        tp: MeshDims = TP_DIM,
        cp: MeshDims = CP_DIM,
        pp: MeshDims = PP_DIM,
        leaders: Leaders = "replica",
        ranks_per_node: int | None = None,
        roles: Mapping[int, Role] | None = None,
    ) -> ClientPlaceTree:
        """The tree of a job that trains over a DeviceMesh, whatever the order of its dimensions and ranks.

        Args:
            mesh: The mesh of all ranks, with names for its dimensions.
            dp: Dimensions whose ranks train on other samples, the slowest first. A mesh may lack dimensions that are
                named here by default; any other that it lacks is an error.
            tp: Dimensions whose ranks receive identical content.
            cp: Dimensions whose ranks receive slices of the same samples.
            pp: Dimensions whose ranks are stages of a pipeline.
            leaders: As in `from_topology`.
            ranks_per_node: As in `from_topology`.
            roles: As in `from_topology`.

        Raises:
            TopologyError: The mesh lacks a named dimension, has several ranks along a dimension that no axis names, or
                is not the mesh of a whole job; or an override is wrong.
        """
        topology = topology_of_mesh(mesh, dp=dp, tp=tp, cp=cp, pp=pp)
        return cls.from_topology(topology, leaders=leaders, ranks_per_node=ranks_per_node, roles=roles)

    @classmethod
    def from_replicas(cls, replica_of_rank: Sequence[int], *, rank: int) -> ClientPlaceTree:
        """The tree of a job whose trainer cuts sequences, and chooses tensors of stages, by itself.

        All ranks of a replica receive the same, whole samples, whatever the axes are that they differ in.

        Args:
            replica_of_rank: [world_size] the data-parallel number of each global rank.
            rank: This process' global rank.

        Raises:
            TopologyError: A replica is missing, or some have more ranks than others.
        """
        replicas, dp = list(replica_of_rank), len(set(replica_of_rank))
        tp, rest = divmod(len(replicas), max(dp, 1))
        if rest or sorted(replicas) != sorted([*range(dp)] * tp):
            raise TopologyError(
                f"replicas: the ranks have the data-parallel numbers {replicas}; number replicas from 0, and give each "
                f"as many ranks as the others"
            )
        rank_at_place = sorted(range(len(replicas)), key=replicas.__getitem__)
        place_of_rank = np.argsort(rank_at_place).tolist() if rank_at_place != sorted(rank_at_place) else []
        return cls.from_topology(Topology(tp=tp, dp=dp, rank=rank, place_of_rank=tuple(place_of_rank)))

    def with_rank(self, rank: int) -> ClientPlaceTree:
        """The same tree, seen from another rank."""
        return replace(self, topology=self.topology.with_rank(rank))

    def group_of(self, num_ranks: int) -> ClientPlaceTree:
        """This rank's group alone, in a job of groups of `num_ranks` (1 or more) neighbours: numbered from 0.

        Replicas keep their numbers, since those say which samples are theirs.

        Raises:
            TopologyError: The groups are no whole replicas.
        """
        topology, first = self.topology, self.topology.rank // num_ranks * num_ranks
        ranks = range(first, first + num_ranks)
        replica_ranks = topology.tp * topology.cp * topology.pp
        members = [topology.coordinates_of(rank) for rank in ranks if rank < topology.world_size]
        replicas = [place.dp for place in members]
        dp = len({*replicas})
        if topology.world_size % num_ranks or dp * replica_ranks != num_ranks or max(replicas) - min(replicas) >= dp:
            raise TopologyError(
                f"topology: groups of {num_ranks} neighbouring ranks are no whole replicas of tp {topology.tp} x cp "
                f"{topology.cp} x pp {topology.pp} in a job of {topology.world_size} ranks; make the topology of all "
                f"groups by Topology.among, from that of one"
            )
        sizes = Topology(tp=topology.tp, cp=topology.cp, pp=topology.pp, dp=dp, rank=topology.rank - first)
        places = tuple(sizes.rank_at(tp=at.tp, cp=at.cp, pp=at.pp, dp=at.dp - min(replicas)) for at in members)
        is_plain = places == (*range(num_ranks),)
        return replace(
            self,
            topology=msgspec.structs.replace(sizes, place_of_rank=() if is_plain else places),
            leader_of_rank=tuple(self.leader_of_rank[rank] - first for rank in ranks),
            replica_of_rank=self.replica_of_rank[first : ranks.stop],
            role_of_rank=self.role_of_rank[first : ranks.stop],
            leaders=tuple(rank - first for rank in self.leaders if rank in ranks),
            _ranks_of_place={
                (leader - first, role): tuple(rank - first for rank in served)
                for (leader, role), served in self._ranks_of_place.items()
                if leader in ranks
            },
        )

    @property
    def replica(self) -> int:
        """Replica of this process."""
        return self.replica_of_rank[self.topology.rank]

    @property
    def role(self) -> Role:
        """Role of this process."""
        return self.role_of_rank[self.topology.rank]

    @property
    def is_leader(self) -> bool:
        """Whether this process reads, for itself and its peers."""
        return self.leader_of_rank[self.topology.rank] == self.topology.rank

    @property
    def is_first_leader(self) -> bool:
        """Whether this process is the first leader of its replica, which speaks for it where replicas are counted."""
        return self.topology.rank == next(rank for rank in self.leaders if self.replica_of_rank[rank] == self.replica)

    @property
    def leaders_without_text(self) -> tuple[int, ...]:
        """The leaders that serve middle stages alone, which get shapes and no tokens or labels; but the first leader of
        a replica, which counts what could not be read."""
        first = {self.replica_of_rank[rank]: rank for rank in reversed(self.leaders)}
        with_text = {leader for leader, role in self._ranks_of_place if role.is_first_stage or role.is_last_stage}
        with_text.update(first.values())
        return tuple(rank for rank in self.leaders if rank not in with_text)

    def leader_of(self, rank: int) -> int:
        """The global rank that fetches for `rank` (itself, for a leader)."""
        check_rank(rank, self.topology, where="place tree")
        return self.leader_of_rank[rank]

    def peers(self, leader: int) -> tuple[int, ...]:
        """The ranks that `leader` serves, ascending, without itself.

        Raises:
            TopologyError: `leader` leads nobody.
        """
        if leader not in self.leaders:
            raise TopologyError(f"rank {leader} is no leader; the leaders are {list(self.leaders)}")
        return tuple(rank for rank, other in enumerate(self.leader_of_rank) if other == leader and rank != leader)

    def roles(self, leader: int) -> tuple[Role, ...]:
        """The roles of the ranks that a leader serves, itself included, sorted so that every rank lists them alike."""
        return tuple(sorted(role for other, role in self._ranks_of_place if other == leader))

    def ranks_of_role(self, leader: int, role: Role) -> tuple[int, ...]:
        """The ranks with this role that a leader serves, itself included, ascending; empty if there are none."""
        return self._ranks_of_place.get((leader, role), ())

    def buckets(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that receive the same data at a level of the tree.

        Buckets are ordered as the tree is read: by replica, then CP slice, then stage, then TP rank. A planner that
        distributes at `axis` divides the data over these buckets.

        Args:
            axis: A level of the tree, as in the table above.
        """
        depth_of_axis = {"DP": 1, "CP": 2, "PP": 3, "TP": 4, "WORLD": 4}
        if axis not in depth_of_axis:
            raise TopologyError(f"unknown axis {axis!r}; the levels are {', '.join(depth_of_axis)}")
        ranks_of_bucket: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.topology.world_size):
            place = self.topology.coordinates_of(rank)
            path = (place.dp, place.cp, place.pp, place.tp)[: depth_of_axis[axis]]
            ranks_of_bucket.setdefault(path, []).append(rank)
        return tuple(tuple(ranks_of_bucket[path]) for path in sorted(ranks_of_bucket))


def _role_of(place: Coordinates, *, num_stages: int) -> Role:
    """The default role of a rank: by its stage and CP slice."""
    stage: Stage
    if num_stages == 1:
        stage = "only"
    elif place.pp == 0:
        stage = "first"
    elif place.pp == num_stages - 1:
        stage = "last"
    else:
        stage = "middle"
    return Role(stage=stage, cp_rank=place.cp)


# --- Ranks that a trainer serves itself: they fetch nothing, but boundaries.
#
# Every rank gets the same tree. Cost: O(ranks) integers.


def tree_with_broadcast(tree: ClientPlaceTree, axis: BroadcastAxis | None) -> ClientPlaceTree:
    """The tree of a job whose trainer sends along an axis.

    At `CP` the first rank gets whole samples, so all ranks have the slice 0 of one; at `PP` the first stage gets
    labels, too.

    Args:
        tree: As the job was given.
        axis: None: the trainer sends nothing.
    """
    topology = tree.topology
    if axis is None or {"TP": topology.tp, "CP": topology.cp, "PP": topology.pp}[axis] == 1:
        return tree
    roles = dict(enumerate(tree.role_of_rank))
    for rank in range(topology.world_size):
        place = topology.coordinates_of(rank)
        cp_rank = 0 if axis == "CP" else place.cp
        if {"TP": place.tp, "CP": place.cp, "PP": place.pp}[axis]:
            roles[rank] = Role(stage="middle", cp_rank=cp_rank)
        elif axis == "PP":
            roles[rank] = Role(stage="only", cp_rank=cp_rank)
    return ClientPlaceTree.from_topology(topology, leaders=dict(enumerate(tree.leader_of_rank)), roles=roles)


# --- Where every rank of a job stands, as plain values that a worker process can be given.
#
# A *place* numbers ranks by replica, CP slice, stage and TP rank, in this order, whatever the ranks' own numbers are;
# a consumer at an axis is a run of places. Cost: some bytes a rank.


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
    leader_of_place: tuple[int, ...] = (0,)
    """[dp * cp * pp * tp] global rank that reads for the rank at a place."""

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
            leader_of_place=tuple(tree.leader_of_rank[rank] for rank in ranks),
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


def layout_of(
    tree: ClientPlaceTree,
    *,
    micro_batch_size: int,
    broadcast_at: BroadcastAxis | None = None,
    elastic: bool = False,
) -> Layout:
    """The grid of a job that samples and items are placed on."""
    sizes = tree.topology
    return Layout(
        dp=sizes.dp,
        micro_batch_size=micro_batch_size,
        tp=sizes.tp,
        cp=sizes.cp,
        pp=sizes.pp,
        broadcast_at=broadcast_at,
        elastic=elastic,
    )
