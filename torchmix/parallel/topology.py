"""Where one rank stands in the training job: coordinates in (tp, cp, pp, dp)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from torchmix.errors import TopologyError
from torchmix.recipe.build import nearest

# --- Where one rank stands in the training job: coordinates in (tp, cp, pp, dp), from numbers alone.
#
# Invariant: tp * cp * pp * dp ranks, numbered as Megatron numbers them ("tp-cp-ep-dp-pp" with ep = 1): tp is the
# fastest axis, then cp, then dp, and pp is the slowest, so
#
#     rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank))
#
# or, as with Megatron's `--use-tp-pp-dp-mapping`, dp is the slowest and pp lies before it. A job that numbers its
# ranks in another way, as any DeviceMesh may, gives the place of each rank in this numbering.
#
# A *replica* is one copy of the model: tp * cp * pp ranks that train on the same samples. The order of the data never
# depends on anything in this file; only who receives what does.
#
# Cost: integer arithmetic. No torch, no sockets, nothing is initialised.

Order = Literal["tp-cp-dp-pp", "tp-cp-pp-dp"]
"""Axes from the fastest, in which neighbouring ranks differ, to the slowest."""


class Coordinates(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a rank on each axis, each in [0, size of the axis)."""

    tp: int
    cp: int
    pp: int
    dp: int


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the parallel axes and the rank this process is.

    Raises:
        TopologyError: A size is below 1, or the rank is not in [0, world_size).
    """

    tp: int = 1
    """Tensor-parallel ranks: identical content."""
    cp: int = 1
    """Context-parallel ranks: the same samples, each its slice of the sequence."""
    pp: int = 1
    """Pipeline stages: the same samples, each stage the tensors it needs."""
    dp: int = 1
    """Data-parallel replicas: different samples."""
    rank: int = 0
    """Global rank in [0, world_size)."""
    order: Order = "tp-cp-dp-pp"
    """How ranks are numbered; Megatron's order by default."""
    place_of_rank: tuple[int, ...] = ()
    """[world_size] the number that each global rank would have in `order`; empty where that is its own."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "dp", "rank"):
            value = getattr(self, name)
            # A bool or a float here is a slip of arguments; both would pass the comparisons below.
            if type(value) is not int:
                raise TopologyError(f"topology: {name}={value!r} is not an integer; pass a plain int")
            if name != "rank" and value < 1:
                raise TopologyError(f"topology: {name}={value} is below 1; use 1 for an axis that is not parallel")
        if self.order not in get_args(Order):
            raise TopologyError(f"topology: order={self.order!r} is not one of {', '.join(get_args(Order))}")
        if not 0 <= self.rank < self.world_size:
            raise TopologyError(
                f"topology: rank {self.rank} is not in [0, {self.world_size}) = [0, tp {self.tp} * cp {self.cp} * "
                f"pp {self.pp} * dp {self.dp}); give the sizes of the whole job and this process' global rank"
            )
        if self.place_of_rank and sorted(self.place_of_rank) != list(range(self.world_size)):
            raise TopologyError(f"topology: place_of_rank does not hold each of 0 to {self.world_size - 1} once")

    @classmethod
    def single(cls) -> Topology:
        """The topology of one process without any parallelism."""
        return cls()

    @classmethod
    def from_torchrun(
        cls, tp: int = 1, cp: int = 1, pp: int = 1, *, environ: Mapping[str, str] | None = None
    ) -> Topology:
        """Read the rank and the world size that torchrun sets; what tp, cp and pp leave over is dp.

        Args:
            tp: Tensor-parallel size, at least 1.
            cp: Context-parallel size, at least 1.
            pp: Pipeline-parallel size, at least 1.
            environ: Stands in for `os.environ`. With neither RANK nor WORLD_SIZE in it, the job is one process.

        Raises:
            TopologyError: The variables are incomplete or not integers, or tp * cp * pp does not divide WORLD_SIZE.
        """
        variables = os.environ if environ is None else environ
        texts = {name: variables.get(name) for name in ("RANK", "WORLD_SIZE")}
        if None not in texts.values():
            rank, world_size = (_int_of_variable(name, str(text)) for name, text in texts.items())
        elif set(texts.values()) == {None}:
            rank, world_size = 0, 1
        else:
            raise TopologyError(
                f"environment: RANK={texts['RANK']!r} but WORLD_SIZE={texts['WORLD_SIZE']!r}; set both, as torchrun "
                "does, or neither for a single process"
            )
        return cls.from_world(world_size=world_size, rank=rank, tp=tp, cp=cp, pp=pp)

    @classmethod
    def from_world(cls, *, world_size: int, rank: int, tp: int = 1, cp: int = 1, pp: int = 1) -> Topology:
        """The topology of `world_size` ranks; what tp, cp and pp leave over is dp.

        Raises:
            TopologyError: A size is below 1, the rank is outside, or tp * cp * pp does not divide `world_size`.
        """
        model_ranks = cls(tp=tp, cp=cp, pp=pp).world_size
        if world_size < 1 or world_size % model_ranks:
            raise TopologyError(
                f"world size {world_size} is not a positive multiple of tp {tp} * cp {cp} * pp {pp} = {model_ranks}; "
                f"start a multiple of {model_ranks} processes (torchrun --nproc-per-node {model_ranks}), or pass sizes "
                f"whose product divides {world_size}"
            )
        return cls(tp=tp, cp=cp, pp=pp, dp=world_size // model_ranks, rank=rank)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def coordinates(self) -> Coordinates:
        """Position of this rank on each axis."""
        return self.coordinates_of(self.rank)

    def coordinates_of(self, rank: int) -> Coordinates:
        """Position of any rank on each axis."""
        rest, tp = divmod(self.place_of_rank[rank] if self.place_of_rank else rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        if self.order == "tp-cp-dp-pp":
            pp, dp = divmod(rest, self.dp)
        else:
            dp, pp = divmod(rest, self.pp)
        return Coordinates(tp=tp, cp=cp, pp=pp, dp=dp)

    @property
    def replica(self) -> int:
        """The data-parallel replica this rank belongs to, in [0, dp)."""
        return self.coordinates.dp

    @property
    def is_leader(self) -> bool:
        """Whether this rank fetches for its replica in the default place tree (tp = cp = pp = 0).

        A job with a place tree of its own asks `ClientPlaceTree.is_leader` instead.
        """
        return self.rank == self.rank_at(dp=self.replica)

    def with_rank(self, rank: int) -> Topology:
        """The same job, seen from another rank."""
        return replace(self, rank=rank)

    def among(self, number: int, count: int) -> Topology:
        """The job of several groups of ranks, such as those of torchft; this topology is one of them.

        Args:
            number: Of this group, in [0, count). Its ranks come behind those of the groups before it, and so do its
                replicas.
            count: Groups, each with as many ranks as this one, in the same places.

        Raises:
            TopologyError: The number is outside.
        """
        if type(number) is not int or type(count) is not int or not 0 <= number < count:
            raise TopologyError(f"topology: group number {number!r} is not in [0, {count!r}) = [0, groups)")
        replica_ranks = self.tp * self.cp * self.pp
        places = []
        for rank in range(self.world_size):
            at = self.coordinates_of(rank)
            places.append(at.tp + self.tp * (at.cp + self.cp * (at.pp + self.pp * at.dp)))
        all_places = [place + group * self.world_size for group in range(count) for place in places]
        is_plain = places == list(range(self.dp * replica_ranks))
        return replace(
            self,
            dp=self.dp * count,
            rank=number * self.world_size + self.rank,
            order="tp-cp-pp-dp",
            place_of_rank=() if is_plain else tuple(all_places),
        )

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The global rank at these coordinates.

        Raises:
            TopologyError: A coordinate is not in [0, size of its axis).
        """
        for axis, index in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
            size: int = getattr(self, axis)
            if not 0 <= index < size:
                raise TopologyError(f"no rank at {axis} {index}: the axis has {size} ranks, 0 to {size - 1}")
        outer = dp + self.dp * pp if self.order == "tp-cp-dp-pp" else pp + self.pp * dp
        place = tp + self.tp * (cp + self.cp * outer)
        return self.place_of_rank.index(place) if self.place_of_rank else place


def _int_of_variable(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise TopologyError(
            f"environment: {name}={text!r} is not an integer; torchrun sets it, unset a stale one"
        ) from None


# --- A topology from torch's DeviceMesh, however its dimensions are named and its ranks are numbered.
#
# Every dimension with several ranks belongs to one axis, since ranks along a forgotten dimension would train on the
# samples of others; the mesh has every rank of the job once. Where an axis has several dimensions, the first is the
# slowest: with dp ("dp_replicate", "dp_shard"), neighbouring shards are neighbouring replicas of the data. Cost:
# O(ranks). The mesh is asked for its ranks and names, and nothing here imports torch.

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
