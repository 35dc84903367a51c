"""`get_batch`: a microbatch as the installed `pretrain_gpt.py` wants it, for the place of this rank."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from torchmix.constructor.fields import (
    Microbatch,
    expand_labels,
    expand_loss_mask,
    expand_position_ids,
    expand_source_index,
    expand_tokens,
)
from torchmix.errors import TopologyError
from torchmix.megatron_adapter import vision
from torchmix.megatron_adapter.arguments import MODALITIES, PARAMS, fields_of_script
from torchmix.megatron_adapter.bins import group_of, items_of_step
from torchmix.megatron_adapter.checkpoint import identify_data, watch_checkpoints
from torchmix.megatron_adapter.losses import MicrobatchSources, SourceLosses, attach, with_source_losses
from torchmix.megatron_adapter.microbatches import Item
from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

# --- Where this rank stands, in Megatron's words: `parallel_state` and arguments -> a place tree.
#
# The tree is the same on every rank, except for the rank itself; this rank's place in it is compared with
# `parallel_state`, so that a layout unknown to torchmix is refused and does not get the data of another rank.
#
#     stage of a chunk          needs
#     first                     tokens, position_ids
#     last                      labels, loss_mask, source_index
#     multi-token prediction    all of them: it embeds tokens and computes a loss, on whatever stage it lies
#     any other                 none
#
# With virtual stages only chunk 0 of the first rank is first, and only the last chunk of the last rank is last.
# Boundaries go to all. Cost: some integers, once.


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


# --- The boundaries of a microbatch as Megatron's `PackedSeqParams`, for attention that stays inside documents.
#
# `cu_seqlens` (true lengths) and `cu_seqlens_padded` (where documents lie) go over the whole microbatch, not cut by
# context parallelism, as Megatron and Transformer Engine expect. Queries and keys have the same boundaries. Only
# fields that the installed Megatron knows are filled, since the dataclass grows from version to version.
#
# Megatron is imported inside the function: torchmix does not depend on it. Cost: a transfer of two small arrays.


def packed_seq_params(microbatch: Microbatch, *, device: torch.device | str | None = None) -> PackedSeqParams:
    """Build Megatron's packing of one microbatch.

    The model then takes its tokens as one row, [1, micro_batch_size * length / cp].

    Args:
        microbatch: From a torchmix loader, on any rank.
        device: Where the boundaries should live; where they are if not given.

    Returns:
        `PackedSeqParams` with `qkv_format` "thd", int32 boundaries [segments + 1], and `max_seqlen` in tokens.

    Raises:
        ImportError: megatron-core is not installed.

    Source: Megatron-LM `pretrain_gpt.py`, `forward_step`.
    """
    cu_seqlens, cu_seqlens_padded = microbatch.cu_seqlens, microbatch.cu_seqlens_padded
    if device is not None:
        cu_seqlens = cu_seqlens.to(device, non_blocking=True)
        cu_seqlens_padded = cu_seqlens_padded.to(device, non_blocking=True)
    return params_of_boundaries(cu_seqlens, cu_seqlens_padded, microbatch.max_seqlen)


def params_of_boundaries(cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor, max_seqlen: int) -> PackedSeqParams:
    """Megatron's dataclass of these boundaries, the same for queries and keys.

    Args:
        cu_seqlens: int32 [segments + 1], by true lengths; those with padding, where padding is to be computed, too.
        cu_seqlens_padded: int32 [segments + 1], by padded lengths.
        max_seqlen: Tokens of the longest segment.

    Raises:
        ImportError: megatron-core is not installed.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    wanted: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens_padded,
        "cu_seqlens_kv_padded": cu_seqlens_padded,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }
    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    return PackedSeqParams(**{name: value for name, value in wanted.items() if name in known})


# --- `get_batch`: a microbatch as the installed `pretrain_gpt.py` wants it.
#
# Every call takes one microbatch, on every stage and rank alike, and none waits for another rank: a collective here
# would deadlock with the pipeline, since later stages wait for activations before they ask for data.
#
#     core                     fields of a batch
#     0.16, 0.17               tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params
#     dev                      the same, and padding_mask
#     0.18, 0.19, 0.20, main   in alphabetical order, with cu_seqlens; `forward_step` makes PackedSeqParams of them
#     of images, all           seven or eight, with images, or a dict; see `vision.py`
#
# Which one is read off the script (`arguments.py`), not off a version. Packed (`boundaries: document`) all samples
# of a microbatch are one row, [1, micro_batch_size * length / cp]; dense (`none`) they are [micro_batch_size, length /
# cp] without boundaries. There is no attention mask. Each stage gets what it needs, and boundaries go to all.
#
# Boundaries are those *with padding*, as Transformer Engine cuts documents under context parallelism, and also where
# it asks for those without: then no kernel must leave gaps between documents. Padding comes last in its document, so
# under causal attention no real token sees it, and its own loss is masked. (Megatron does likewise: "a bug forcing
# cu_seqlens to be cu_seqlens_padded".) The list has the true boundaries at `cu_seqlens`, from which Megatron counts
# FLOPs.
#
# Cost: copies to the GPU of 4 bytes a token, or 8 where one stage has all, without waiting, from pinned memory; what
# the model takes is made there.

GetBatch = Callable[..., Any]

losses_of_part: dict[str, SourceLosses] = {}
"""Where losses by source are added up, by part of the recipe; filled when the iterators are made."""
needs_of_stage: dict[int | None, Needs] = {}
"""What the chunks of this rank work with, by virtual stage; found when a chunk asks first."""
scripts_with_losses: set[str] = set()
"""Names of the scripts whose `loss_func` is wrapped: without one, a policy would wait for losses for ever."""


def get_batch(script: MutableMapping[str, Any]) -> GetBatch:
    """What a script calls instead of its own `get_batch`, from the line before it trains.

    Also wraps the script's `loss_func`, so that it adds up losses by source, begins to watch which checkpoint Megatron
    loads, and lets Megatron's distillation identify the data.

    Args:
        script: `globals()` of the script, which has `get_batch` and `forward_step`, and perhaps `BATCH_KEYS` and
            `loss_func`.

    Raises:
        RecipeError: It expects fields that torchmix does not know, or hashes data in a way that torchmix does not know.
    """
    from megatron.training import checkpointing, get_args

    names = fields_of_script(script)
    vision.at_hand = of_images = vision.vision_script(script, names)
    finish_params = script.get("finalize_packed_seq_params")  # of dev; other versions need no more than the object
    watch_checkpoints(checkpointing)
    identify_data()
    if "loss_func" in script:
        of_last = None if of_images is None else of_images.sources_of_last
        script["loss_func"] = with_source_losses(script["loss_func"], of_last)
        scripts_with_losses.add(str(script.get("__name__")))
    needs_of_stage.clear()

    def get_batch(data_iterator: Any, vp_stage: int | None = None, *more: int) -> Any:
        """One microbatch of one model chunk."""
        given: tuple[int, ...] = ()
        if more and vp_stage is not None:  # of a vision script without virtual stages
            given, vp_stage = (vp_stage, *more), None
        if vp_stage not in needs_of_stage:
            needs_of_stage[vp_stage] = needs_of_chunk(get_args(), vp_stage)
        item = items_of_step.popleft() if data_iterator is None else next(data_iterator)
        fields = fields_of(item, needs_of_stage[vp_stage])
        if of_images is not None:
            fields = of_images.fields_of(fields, item, *given)
        if MODALITIES in names:
            return {name: fields[name] for name in names}
        if PARAMS in names:
            fields[PARAMS] = params = _params(fields)
            if finish_params is not None:
                finish_params(params)
            return tuple(fields.get(name) for name in names)
        return tuple(_batched(name, fields.get(name)) for name in names)

    return get_batch


def fields_of(item: Item, needs: Needs) -> dict[str, Any]:
    """The fields of a microbatch that a chunk needs, on the device that trains.

    Args:
        item: From an iterator of `microbatches.py`; stays as it is.
        needs: The needs of the chunk.

    Returns:
        By name: `tokens`, `position_ids`, `labels`, `loss_mask` where needed, and if packed `cu_seqlens`,
        `cu_seqlens_padded` (int32 [segments + 1]) and `max_seqlen` (int32 [1], on the CPU, so that Megatron's `.item()`
        waits for nothing). With runs of ranks `local_cp_size` (likewise), and `hybrid_cp_group`, Megatron's group.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    packed = item["cu_seqlens"] is not None

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if device is None else tensor.to(device, non_blocking=True)

    def row(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(1, -1) if packed else tensor

    fields: dict[str, Any] = {}
    spans = moved(item["spans"])
    if needs.tokens:
        tokens = moved(item["tokens"])
        fields["tokens"] = row(expand_tokens(tokens))
        fields["position_ids"] = row(expand_position_ids(spans, tokens.shape))
    if needs.labels:
        labels = moved(item["labels"])
        fields["labels"] = row(expand_labels(labels))
        fields["loss_mask"] = row(expand_loss_mask(labels))
        losses = losses_of_part.get(item["part"])
        if losses is not None:
            index = expand_source_index(spans, labels.shape)
            sources = MicrobatchSources(
                index=index,
                losses=losses,
                step=item["step"],
                is_first_of_step=item["index"] == 0,
                is_last_of_step=item["is_last_of_step"],
            )
            attach(fields["loss_mask"], sources)
    if packed:
        fields |= {name: moved(item[name]) for name in ("cu_seqlens", "cu_seqlens_padded")}
        fields["max_seqlen"] = torch.tensor([item["max_seqlen"]], dtype=torch.int32)
    if "cp_size" in item:
        fields["local_cp_size"] = torch.tensor([item["cp_size"]], dtype=torch.int32)
        fields["hybrid_cp_group"] = group_of(item["cp_size"])
    return fields


def _batched(name: str, value: Any) -> Any:
    """A field of the list: Megatron takes boundaries with a leading dimension, and squeezes it away."""
    return value.unsqueeze(0) if value is not None and name in ("cu_seqlens", "cu_seqlens_padded") else value


def _params(fields: dict[str, Any]) -> Any:
    """PackedSeqParams of a packed microbatch, None of a dense one."""
    if "cu_seqlens" not in fields:
        return None
    padded = fields["cu_seqlens_padded"]
    params = params_of_boundaries(padded, padded, int(fields["max_seqlen"]))
    if "local_cp_size" in fields:
        params.local_cp_size, params.cp_group = int(fields["local_cp_size"]), fields["hybrid_cp_group"]
    return params
