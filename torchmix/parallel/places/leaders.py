"""Which ranks read, and for whom: one leader a replica, one in each node of a replica, or one for each stage of it.

In: a topology and a choice. Out: the leader of each rank. Must hold: a leader is of the replica of the ranks that it
serves, and leads itself; every rank gets the same answer. Cost: O(ranks) integers.

    "replica"   one read a replica; its exchange may cross nodes
    "node"      one read a replica and node: what is sent stays in the node, and groups are smaller
    "stage"     one read a replica and pipeline stage: no stage waits for another one's leader
    a map       rank -> its leader, for ranks that "replica" would not give it

Each further leader plans and reads all of its replica's step. It pays that in memory and reading, and its peers wait
for fewer ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from torchmix.errors import TopologyError
from torchmix.parallel.topology import Topology
from torchmix.recipe.build import nearest

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
