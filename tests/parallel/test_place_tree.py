"""ClientPlaceTree: buckets, leaders and roles of every rank, from numbers alone."""

from __future__ import annotations

import pytest

from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology

LAYOUTS = [
    Topology(),
    Topology(dp=4),
    Topology(tp=2, dp=2),
    Topology(cp=2, dp=2),
    Topology(pp=2, dp=2),
    Topology(pp=4),
    Topology(tp=2, cp=2, pp=3, dp=2),
]


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
def test_each_rank_is_served_once(topology: Topology) -> None:
    tree = ClientPlaceTree.from_topology(topology)
    served = sorted(rank for leader in tree.leaders for rank in (leader, *tree.peers(leader)))
    assert served == list(range(topology.world_size))
    of_roles = sorted(
        rank
        for replica in range(topology.dp)
        for role in tree.roles(replica)
        for rank in tree.ranks_of_role(replica, role)
    )
    assert of_roles == list(range(topology.world_size))


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
def test_ranks_of_a_role_are_tensor_parallel_peers(topology: Topology) -> None:
    tree = ClientPlaceTree.from_topology(topology)
    for rank in range(topology.world_size):
        place = topology.with_rank(rank).coordinates
        role = tree.role_of_rank[rank]
        mates = tree.ranks_of_role(place.dp, role)
        same_slice = [
            other
            for other in range(topology.world_size)
            if (lambda at: (at.cp, at.dp) == (place.cp, place.dp))(topology.with_rank(other).coordinates)
            and tree.role_of_rank[other].stage == role.stage
        ]
        assert list(mates) == same_slice


@pytest.mark.parametrize(
    ("pp", "stages"),
    [(1, ["only"]), (2, ["first", "last"]), (4, ["first", "middle", "middle", "last"])],
)
def test_stage_of_a_rank_follows_its_pipeline_place(pp: int, stages: list[str]) -> None:
    tree = ClientPlaceTree.from_topology(Topology(pp=pp))
    assert [role.stage for role in tree.role_of_rank] == stages


def test_what_a_stage_needs() -> None:
    needs = {
        stage: (Role(stage=stage, cp_rank=0).is_first_stage, Role(stage=stage, cp_rank=0).is_last_stage)
        for stage in ("only", "first", "middle", "last")
    }
    assert needs == {"only": (True, True), "first": (True, False), "middle": (False, False), "last": (False, True)}


def test_buckets_are_the_levels_of_the_tree() -> None:
    tree = ClientPlaceTree.from_topology(Topology(tp=2, cp=2, pp=2, dp=2))
    assert tree.buckets("DP") == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert tree.buckets("CP") == ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
    assert tree.buckets("PP") == ((0, 1), (8, 9), (2, 3), (10, 11), (4, 5), (12, 13), (6, 7), (14, 15))
    assert tree.buckets("WORLD") == tree.buckets("TP")
    assert sorted(tree.buckets("WORLD")) == [(rank,) for rank in range(16)]


def test_an_unknown_axis_names_the_levels() -> None:
    with pytest.raises(TopologyError, match="unknown axis 'EP'; the levels are DP, CP, PP, TP, WORLD"):
        ClientPlaceTree.from_topology(Topology()).buckets("EP")


def test_the_same_tree_is_seen_from_every_rank() -> None:
    tree = ClientPlaceTree.from_topology(Topology(tp=2, dp=2))
    for rank in range(4):
        view = ClientPlaceTree.from_topology(Topology(tp=2, dp=2, rank=rank))
        assert view == tree.with_rank(rank)
        assert view.is_leader == (rank in (0, 2))
        assert view.leader_of(rank) == (0, 0, 2, 2)[rank]


def test_a_leader_can_be_overridden() -> None:
    tree = ClientPlaceTree.from_topology(Topology(tp=2, dp=2, rank=3), leaders={1: 3})
    assert tree.leaders == (0, 3)
    assert tree.is_leader
    assert tree.peers(3) == (2,)


def test_a_role_can_be_overridden() -> None:
    wants_labels = Role(stage="last", cp_rank=0)
    tree = ClientPlaceTree.from_topology(Topology(pp=3), roles={1: wants_labels})
    assert tree.ranks_of_role(0, wants_labels) == (1, 2)
    assert tree.roles(0) == (Role(stage="first", cp_rank=0), wants_labels)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"leaders": {2: 0}}, "there is no replica 2; dp is 2"),
        ({"leaders": {0: 9}}, "there is no rank 9; the job has ranks 0 to 3"),
        ({"leaders": {0: 3}}, r"rank 3 belongs to replica 1, not to replica 0; choose one of \[0, 1\]"),
        ({"roles": {4: Role(stage="only", cp_rank=0)}}, "there is no rank 4"),
        ({"roles": {0: Role(stage="only", cp_rank=1)}}, "rank 0 has cp_rank 1, but cp is 1"),
    ],
)
def test_a_bad_override_is_named(overrides: dict[str, dict[int, int]], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ClientPlaceTree.from_topology(Topology(tp=2, dp=2), **overrides)


def test_peers_of_a_rank_that_does_not_lead_is_an_error() -> None:
    with pytest.raises(TopologyError, match=r"rank 1 leads no replica; the leaders are \[0, 2\]"):
        ClientPlaceTree.from_topology(Topology(tp=2, dp=2)).peers(1)
