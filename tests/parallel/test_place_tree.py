"""ClientPlaceTree: buckets, leaders and roles of every rank, from numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import ClientPlaceTree, LeaderChoice, Role
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
        rank for leader in tree.leaders for role in tree.roles(leader) for rank in tree.ranks_of_role(leader, role)
    )
    assert of_roles == list(range(topology.world_size))


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
def test_ranks_of_a_role_are_tensor_parallel_peers(topology: Topology) -> None:
    tree = ClientPlaceTree.from_topology(topology)
    for rank in range(topology.world_size):
        place = topology.with_rank(rank).coordinates
        role = tree.role_of_rank[rank]
        mates = tree.ranks_of_role(tree.leader_of(rank), role)
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
    tree = ClientPlaceTree.from_topology(Topology(tp=2, dp=2, rank=3), leaders={2: 3, 3: 3})
    assert tree.leaders == (0, 3)
    assert tree.is_leader
    assert tree.peers(3) == (2,)


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
@pytest.mark.parametrize("leaders", ["replica", "node", "stage"])
def test_a_leader_is_of_the_replica_and_reads_for_itself(topology: Topology, leaders: LeaderChoice) -> None:
    ranks_per_node = topology.world_size // 2 or 1
    tree = ClientPlaceTree.from_topology(topology, leaders=leaders, ranks_per_node=ranks_per_node)
    for rank, leader in enumerate(tree.leader_of_rank):
        assert tree.replica_of_rank[leader] == tree.replica_of_rank[rank]
        assert tree.leader_of(leader) == leader
        if leaders == "node":
            assert leader // ranks_per_node == rank // ranks_per_node
        if leaders == "stage":
            assert topology.coordinates_of(leader).pp == topology.coordinates_of(rank).pp
    assert sorted(rank for one in tree.leaders for rank in (one, *tree.peers(one))) == list(range(topology.world_size))
    firsts = [rank for rank in tree.leaders if tree.with_rank(rank).is_first_leader]
    assert [tree.replica_of_rank[rank] for rank in firsts] == list(range(topology.dp))


def test_more_leaders_make_smaller_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(tp=2, pp=2, dp=2)
    assert ClientPlaceTree.from_topology(topology, leaders="stage").leaders == (0, 4, 2, 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ClientPlaceTree.from_topology(topology, leaders="node").leaders == (0, 4, 2, 6)
    together = Topology(tp=2, pp=2, dp=2, order="tp-cp-pp-dp")
    assert ClientPlaceTree.from_topology(together, leaders="node").leaders == (0, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(TopologyError, match="unknown ranks a node, in a job of 8 ranks: give ranks_per_node"):
        ClientPlaceTree.from_topology(topology, leaders="node")


def test_a_role_can_be_overridden() -> None:
    wants_labels = Role(stage="last", cp_rank=0)
    tree = ClientPlaceTree.from_topology(Topology(pp=3), roles={1: wants_labels})
    assert tree.ranks_of_role(0, wants_labels) == (1, 2)
    assert tree.roles(0) == (Role(stage="first", cp_rank=0), wants_labels)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"leaders": {9: 0}}, "there is no rank 9; the job has ranks 0 to 3"),
        ({"leaders": {0: 9}}, "there is no rank 9; the job has ranks 0 to 3"),
        (
            {"leaders": {0: 3}},
            r"rank 3 belongs to replica 1 and cannot lead rank 0 of replica 0; choose one of \[0, 1\]",
        ),
        ({"leaders": {2: 3}}, "rank 3 leads rank 2, but its own leader is rank 2; map 3 to 3 too"),
        ({"leaders": "stages"}, "leaders='stages' is not one of replica, node, stage.*did you mean"),
        ({"leaders": "node", "ranks_per_node": 3}, "3 ranks a node, in a job of 4 ranks"),
        ({"roles": {4: Role(stage="only", cp_rank=0)}}, "there is no rank 4"),
        ({"roles": {0: Role(stage="only", cp_rank=1)}}, "rank 0 has cp_rank 1, but cp is 1"),
    ],
)
def test_a_bad_override_is_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ClientPlaceTree.from_topology(Topology(tp=2, dp=2), **overrides)


def test_peers_of_a_rank_that_does_not_lead_is_an_error() -> None:
    with pytest.raises(TopologyError, match=r"rank 1 is no leader; the leaders are \[0, 2\]"):
        ClientPlaceTree.from_topology(Topology(tp=2, dp=2)).peers(1)


def test_ranks_of_a_replica_may_be_numbered_in_any_way_and_get_the_same() -> None:
    trees = [ClientPlaceTree.from_replicas([1, 0, 0, 1, 2, 2], rank=rank) for rank in range(6)]
    assert [tree.replica for tree in trees] == [1, 0, 0, 1, 2, 2]
    assert {tree.role for tree in trees} == {Role(stage="only", cp_rank=0)}
    assert trees[0].buckets("DP") == ((1, 2), (0, 3), (4, 5))
    assert trees[0].leaders == (1, 0, 4)
    assert ClientPlaceTree.from_replicas([0, 1], rank=1) == ClientPlaceTree.from_topology(Topology(dp=2, rank=1))


@pytest.mark.parametrize("replicas", [[0, 0, 1], [1, 1], [0, 2], [-1, 0]])
def test_replicas_that_are_no_job_are_refused(replicas: list[int]) -> None:
    with pytest.raises(TopologyError, match=r"number replicas from 0, and give each as many ranks as the others"):
        ClientPlaceTree.from_replicas(replicas, rank=0)


@pytest.mark.parametrize("one", [Topology(tp=2, pp=2), Topology(pp=2, dp=2), Topology(pp=2, dp=2, order="tp-cp-pp-dp")])
def test_a_group_apart_has_its_own_ranks_and_the_replicas_of_the_job(one: Topology) -> None:
    alone = ClientPlaceTree.from_topology(one, leaders="stage")
    for number in range(2):
        for rank in range(one.world_size):
            whole = ClientPlaceTree.from_topology(one.with_rank(rank).among(number, 2), leaders="stage")
            group = whole.group_of(one.world_size)
            own = alone.with_rank(rank)
            assert (group.leaders, group.leader_of_rank, group.role_of_rank) == (
                own.leaders,
                own.leader_of_rank,
                own.role_of_rank,
            )
            assert group.topology.coordinates == own.topology.coordinates
            assert group.replica == whole.replica == own.replica + number * one.dp
            for leader in group.leaders:
                assert group.roles(leader) == own.roles(leader)
                assert all(
                    group.ranks_of_role(leader, role) == own.ranks_of_role(leader, role) for role in own.roles(leader)
                )
