"""Where this rank stands, in Megatron's words: `parallel_state` and arguments -> a place tree.

In: Megatron's initialised `parallel_state`, and its arguments. Out: the job's `ClientPlaceTree`, and for each model
chunk of this rank the fields that it needs. Must hold: the tree is the same on every rank, except for the rank itself;
this rank's place in it is compared with `parallel_state`, so that a layout unknown to torchmix is refused and does not
get the data of another rank.

    stage of a chunk          needs
    first                     tokens, position_ids
    last                      labels, loss_mask, source_index
    multi-token prediction    all of them: it embeds tokens and computes a loss, on whatever stage it lies
    any other                 none

With virtual stages only chunk 0 of the first rank is first, and only the last chunk of the last rank is last.
Boundaries go to all. Cost: some integers, once.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import torch.distributed as dist

from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a model chunk works with."""

    tokens: bool
    """tokens and position_ids."""
    labels: bool
    """labels, loss_mask and source_index."""


def tree_of_job(args: Any) -> ClientPlaceTree:
    """The place tree of the job that Megatron has started.

    Args:
        args: Megatron's arguments.

    Raises:
        TopologyError: Megatron has an axis, or an order of ranks, that torchmix does not know; or leaders of nodes are
            asked for, and the nodes are not known.
    """
    from megatron.core import parallel_state

    topology = Topology(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
        order="tp-cp-pp-dp" if getattr(args, "use_tp_pp_dp_mapping", False) else "tp-cp-dp-pp",
    )
    sizes = f"tp {topology.tp} x cp {topology.cp} x pp {topology.pp} x dp {topology.dp}"
    if topology.world_size != dist.get_world_size():
        raise TopologyError(
            f"Megatron's {sizes} makes {topology.world_size} ranks, the job has {dist.get_world_size()}: it has an "
            f"axis that torchmix does not know (such as that of --tensor-parallel-num-weight-shards); run without it"
        )
    topology = topology.with_rank(dist.get_rank())
    place = topology.coordinates
    expected = (place.tp, place.cp, place.pp, place.dp)
    found = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    if found != expected:
        raise TopologyError(
            f"rank {topology.rank} is at (tp, cp, pp, dp) = {found} for Megatron, and at {expected} where ranks of "
            f"{sizes} are numbered {topology.order}; torchmix knows this order and that of --use-tp-pp-dp-mapping"
        )
    roles = _prediction_roles(topology, args)
    return ClientPlaceTree.from_topology(topology, leaders=args.data_leaders, roles=roles)


def _prediction_roles(topology: Topology, args: Any) -> dict[int, Role]:
    """The ranks of stages with multi-token prediction; with one stage there is nothing to add."""
    if not getattr(args, "mtp_num_layers", None) or topology.pp == 1:
        return {}
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    stages = set(get_mtp_ranks(list(range(topology.pp)), config))
    places = {rank: topology.with_rank(rank).coordinates for rank in range(topology.world_size)}
    return {rank: Role(stage="only", cp_rank=place.cp) for rank, place in places.items() if place.pp in stages}


def needs_of_chunk(args: Any, vp_stage: int | None) -> Needs:
    """What one model chunk of this rank works with.

    Args:
        args: Megatron's arguments.
        vp_stage: The virtual stage of the chunk; None without virtual stages.
    """
    from megatron.core import parallel_state

    virtual: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    predicts = _predicts(args, vp_stage)
    return Needs(
        tokens=predicts or parallel_state.is_pipeline_first_stage(**virtual),
        labels=predicts or parallel_state.is_pipeline_last_stage(**virtual),
    )


def _predicts(args: Any, vp_stage: int | None) -> bool:
    """Whether a chunk holds layers of multi-token prediction."""
    if not getattr(args, "mtp_num_layers", None):
        return False
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    what: dict[str, Any] = {"config": config}
    if "config" not in inspect.signature(mtp_on_this_rank).parameters:  # core 0.17 and newer
        what = {"layout": config.pipeline_model_parallel_layout, "mtp_num_layers": config.mtp_num_layers}
    return bool(mtp_on_this_rank(**what, ignore_virtual=False, vp_stage=vp_stage))
