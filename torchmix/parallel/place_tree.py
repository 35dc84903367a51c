"""Who shares what at each axis of the job, and who leads: the ClientPlaceTree of MegaScale-Data (section 4.1).

In: a `Topology`, and optionally who leads, or a role for some ranks. Out: the tree, as numbers: for every rank its
replica, its role and its leader; for every axis its buckets.

The levels below the root are the axes in the order in which they divide the data, which is not the order of ranks:

    DP      other samples than the next bucket                dp buckets of tp*cp*pp ranks, the replicas
    CP      the same samples, another slice of the sequence   dp*cp buckets of tp*pp ranks
    PP      the same slice, the tensors of one stage          dp*cp*pp buckets of tp ranks
    TP      identical content                                 the leaves, one rank each; "WORLD" names the same level

A *leader* plans, fetches and builds one replica's steps for its *peers*: the other ranks of the replica, or those of
them in its node or stage, where a replica has several leaders (`places/leaders.py`). A *role* (stage and CP slice)
names what a rank receives: ranks of one replica and role, the TP peers, receive identical bytes.

Invariants: each rank has one leader, which is of its replica and leads itself; each rank has one role; every rank of
the job that builds the tree from the same arguments gets the same tree. Cost: O(world size)
integers, no torch, no communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from torchmix.errors import TopologyError
from torchmix.parallel.places.device_mesh import CP_DIM, DP_DIMS, PP_DIM, TP_DIM, DeviceMesh, MeshDims, topology_of_mesh
from torchmix.parallel.places.leaders import Leaders, check_rank, leaders_of
from torchmix.parallel.topology import Coordinates, Topology

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
    """The places of all ranks of a job. Build it with `from_topology` or `from_device_mesh`."""

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

    def with_rank(self, rank: int) -> ClientPlaceTree:
        """The same tree, seen from another rank."""
        return replace(self, topology=self.topology.with_rank(rank))

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
