"""A place tree from a DeviceMesh: any names, any order of dimensions, any order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology


@dataclass
class Mesh:
    """What is used of torch's DeviceMesh."""

    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...] | None
    rank: int = 0

    def get_rank(self) -> int:
        return self.rank


def mesh_of(sizes: Sequence[int], *names: str, rank: int = 0, ranks: Sequence[int] | None = None) -> Mesh:
    numbers = torch.arange(torch.Size(sizes).numel()) if ranks is None else torch.tensor(ranks)
    return Mesh(numbers.reshape(tuple(sizes)), names, rank)


def test_a_mesh_in_the_order_of_megatron_gives_its_topology() -> None:
    tree = ClientPlaceTree.from_device_mesh(mesh_of((2, 3, 2, 2), "pp", "dp_shard", "cp", "tp", rank=5))
    assert tree.topology == Topology(tp=2, cp=2, pp=2, dp=3, rank=5)
    assert tree == ClientPlaceTree.from_topology(tree.topology)


def test_two_dimensions_of_data_are_one_axis() -> None:
    tree = ClientPlaceTree.from_device_mesh(mesh_of((2, 2, 2), "dp_replicate", "dp_shard", "tp"))
    assert tree.topology == Topology(tp=2, dp=4)
    apart = ClientPlaceTree.from_device_mesh(mesh_of((2, 2, 2), "dp_replicate", "pp", "dp_shard"))
    assert apart.topology.dp == 4
    assert apart.replica_of_rank == (0, 1, 0, 1, 2, 3, 2, 3)
    assert [role.stage for role in apart.role_of_rank] == ["first", "first", "last", "last"] * 2
    assert apart.leaders == (0, 1, 4, 5)


def test_any_order_of_ranks() -> None:
    ranks = [5, 0, 3, 7, 1, 6, 2, 4]
    for rank in range(8):
        tree = ClientPlaceTree.from_device_mesh(mesh_of((2, 2, 2), "tp", "dp_shard", "cp", ranks=ranks, rank=rank))
        places = {ranks[place]: (place >> 1 & 1, place & 1, place >> 2) for place in range(8)}
        assert tree.topology.coordinates.dp == tree.replica == places[rank][0]
        assert tree.role.cp_rank == places[rank][1]
        assert tree.topology.coordinates.tp == places[rank][2]
        at = tree.topology.coordinates
        assert tree.topology.rank_at(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
    assert tree.leaders == (5, 3)
    assert tree.buckets("DP") == ((0, 1, 5, 6), (2, 3, 4, 7))


def test_names_of_the_user() -> None:
    mesh = mesh_of((2, 2, 1), "data", "model", "spare")
    tree = ClientPlaceTree.from_device_mesh(mesh, dp="data", tp="model", cp=None)
    assert tree.topology == Topology(tp=2, dp=2)


@pytest.mark.parametrize(
    ("mesh", "axes", "message"),
    [
        (
            mesh_of((2, 2), "data", "tp"),
            {},
            r"'data' of the mesh has 2 ranks and is none of pp \[\], dp \[\]",
        ),
        (mesh_of((2, 2), "data", "model"), {"dp": "data", "tp": "modle"}, "tp='modle' is no dimension.*model"),
        (mesh_of((2, 2), "dp_shard", "tp"), {"cp": "tp"}, "dimension 'tp' is given to cp and to tp"),
        (mesh_of((2,), "dp_shard", ranks=[2, 3]), {}, r"the mesh has ranks \[2, 3\]..., not 0 to 1"),
        (Mesh(torch.arange(4), None), {}, "is no DeviceMesh with named dimensions"),
        (mesh_of((2,), "dp_shard", rank=2), {}, "rank 2 is not in"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(mesh: Mesh, axes: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ClientPlaceTree.from_device_mesh(mesh, **axes)


def test_the_mesh_of_torch() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=6, world_size=8)
    try:
        names = ("dp_replicate", "tp", "dp_shard")
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        tree = ClientPlaceTree.from_device_mesh(mesh)
        assert (tree.topology.tp, tree.topology.dp, tree.topology.rank) == (2, 4, 6)
        assert tree.replica == mesh["dp_replicate"].get_local_rank() * 2 + mesh["dp_shard"].get_local_rank()
        with pytest.raises(TopologyError, match="give the mesh of the whole job"):
            ClientPlaceTree.from_device_mesh(mesh["dp_shard"])
    finally:
        torch.distributed.destroy_process_group()
