"""A topology from torch's DeviceMesh, however its dimensions are named and its ranks are numbered.

In: the mesh, and which of its dimensions are dp, cp, tp and pp. Out: a `Topology`. Must hold: every dimension with
several ranks belongs to one axis, since ranks along a forgotten dimension would train on the samples of others; the
mesh has every rank of the job once. Where an axis has several dimensions, the first is the slowest: with dp
("dp_replicate", "dp_shard"), neighbouring shards are neighbouring replicas of the data. Cost: O(ranks). The mesh is
asked for its ranks and names, and nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from torchmix.errors import TopologyError
from torchmix.parallel.topology import Topology
from torchmix.recipe.build import nearest

DeviceMesh: TypeAlias = Any
"""Torch's class, of which `mesh`, `mesh_dim_names` and `get_rank` are used; it is not imported here."""

MeshDims: TypeAlias = str | Sequence[str] | None
"""Names of a mesh's dimensions that form one axis; None for an axis that is not parallel."""

DP_DIMS, TP_DIM, CP_DIM, PP_DIM = ("dp_replicate", "dp_shard"), "tp", "cp", "pp"
"""The names that torchtitan uses; a mesh may lack any of these."""


def topology_of_mesh(mesh: DeviceMesh, *, dp: MeshDims, tp: MeshDims, cp: MeshDims, pp: MeshDims) -> Topology:
    """The topology of the job that a DeviceMesh describes.

    Args:
        mesh: A `torch.distributed.device_mesh.DeviceMesh` over all ranks of the job, with named dimensions.
        dp: Dimensions along which ranks train on other samples, the slowest first.
        tp: Dimensions along which ranks receive identical content.
        cp: Dimensions along which ranks receive slices of the same samples.
        pp: Dimensions along which ranks are stages of a pipeline.

    Raises:
        TopologyError: The mesh has no names, lacks a named dimension, has a dimension with several ranks that no axis
            names, or its ranks are not those of a job.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise TopologyError(
            f"topology: {type(mesh).__name__} {mesh!r} is no DeviceMesh with named dimensions; make it with "
            "init_device_mesh(..., mesh_dim_names=('dp_shard', 'tp'))"
        )
    ranks = np.asarray(mesh.mesh.tolist(), np.int64)
    dims_of_axis = {
        axis: _present(axis, dims, names) for axis, dims in {"pp": pp, "dp": dp, "cp": cp, "tp": tp}.items()
    }
    size_of_dim: dict[str, int] = dict(zip(names, ranks.shape, strict=True))
    _check_each_once(dims_of_axis, size_of_dim)
    wanted = [names.index(name) for dims in dims_of_axis.values() for name in dims]
    rest = [dim for dim in range(ranks.ndim) if dim not in wanted]  # of one rank each
    rank_at_place = ranks.transpose(wanted + rest).ravel()
    if sorted(rank_at_place.tolist()) != list(range(ranks.size)):
        raise TopologyError(
            f"topology: the mesh has ranks {sorted(rank_at_place.tolist())[:8]}..., not 0 to {ranks.size - 1}; give "
            "the mesh of the whole job, not a part of it"
        )
    place_of_rank = np.argsort(rank_at_place).tolist()
    sizes = {axis: math.prod(size_of_dim[name] for name in dims) for axis, dims in dims_of_axis.items()}
    return Topology(
        tp=sizes["tp"],
        cp=sizes["cp"],
        pp=sizes["pp"],
        dp=sizes["dp"],
        rank=int(mesh.get_rank()),
        place_of_rank=() if place_of_rank == list(range(ranks.size)) else tuple(place_of_rank),
    )


def _present(axis: str, dims: MeshDims, names: Sequence[str]) -> tuple[str, ...]:
    """The dimensions of an axis. Those of a default may be missing, any other may not."""
    asked = (dims,) if isinstance(dims, str) else tuple(dims or ())
    default = {"dp": DP_DIMS, "tp": (TP_DIM,), "cp": (CP_DIM,), "pp": (PP_DIM,)}[axis]
    for name in asked:
        if name not in names and name not in default:
            raise TopologyError(
                f"topology: {axis}={name!r} is no dimension of the mesh{nearest(name, names)}; it has {list(names)}"
            )
    return tuple(name for name in asked if name in names)


def _check_each_once(dims_of_axis: Mapping[str, Sequence[str]], size_of_dim: Mapping[str, int]) -> None:
    axis_of_dim: dict[str, str] = {}
    for axis, dims in dims_of_axis.items():
        for name in dims:
            if name in axis_of_dim:
                raise TopologyError(f"topology: dimension {name!r} is given to {axis_of_dim[name]} and to {axis}")
            axis_of_dim[name] = axis
    for name, size in size_of_dim.items():
        if size > 1 and name not in axis_of_dim:
            raise TopologyError(
                f"topology: dimension {name!r} of the mesh has {size} ranks and is none of "
                f"{', '.join(f'{axis} {list(dims)}' for axis, dims in dims_of_axis.items())}; name its axis, such as "
                f"dp=({name!r},) where its ranks train on other samples"
            )
