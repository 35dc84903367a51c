"""`get_batch`: a microbatch as the installed `pretrain_gpt.py` wants it.

In: the script's own names (`globals()`), and microbatches from the iterators of `datasets.py`. Out: a function with the
signature and result of the script's `get_batch`. Must hold: every call takes one microbatch, on every stage and rank
alike, and none waits for another rank: a collective here would deadlock with the pipeline, since later stages wait for
activations before they ask for data.

    core                     fields of a batch
    0.16, 0.17               tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params
    dev                      the same, and padding_mask
    0.18, 0.19, 0.20, main   in alphabetical order, with cu_seqlens; `forward_step` makes PackedSeqParams of them

Which one is read off the script (`script_fields.py`), not off a version. Packed (`boundaries: document`) all samples of
a microbatch are one row, [1, micro_batch_size * length / cp]; dense (`none`) they are [micro_batch_size, length / cp]
without boundaries. There is no attention mask. Each stage gets what it needs, and boundaries go to all.

Boundaries are those *with padding*, as Transformer Engine cuts documents under context parallelism, and also where it
asks for those without: then no kernel must leave gaps between documents. Padding comes last in its document, so under
causal attention no real token sees it, and its own loss is masked. (Megatron does likewise: "a bug forcing cu_seqlens
to be cu_seqlens_padded".) The list has the true boundaries at `cu_seqlens`, from which Megatron counts FLOPs.

Cost: copies to the GPU of 4 bytes a token, or 8 where one stage has all, without waiting, from pinned memory; what the
model takes is made there.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from torchmix.constructor.expand import (
    expand_labels,
    expand_loss_mask,
    expand_position_ids,
    expand_source_index,
    expand_tokens,
)
from torchmix.megatron_adapter.checkpoint_args import watch_checkpoints
from torchmix.megatron_adapter.distillation import identify_data
from torchmix.megatron_adapter.losses.source_loss import MicrobatchSources, SourceLosses, attach, with_source_losses
from torchmix.megatron_adapter.microbatches import Item
from torchmix.megatron_adapter.packed_seq import params_of_boundaries
from torchmix.megatron_adapter.places import Needs, needs_of_chunk
from torchmix.megatron_adapter.script_fields import PARAMS, fields_of_script

GetBatch = Callable[..., Any]

losses_of_part: dict[str, SourceLosses] = {}
"""Where losses by source are added up, by part of the recipe; filled when the iterators are made."""
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
    finish_params = script.get("finalize_packed_seq_params")  # of dev; other versions need no more than the object
    watch_checkpoints(checkpointing)
    identify_data()
    if "loss_func" in script:
        script["loss_func"] = with_source_losses(script["loss_func"])
        scripts_with_losses.add(str(script.get("__name__")))
    needs_of_stage: dict[int | None, Needs] = {}

    def get_batch(data_iterator: Any, vp_stage: int | None = None) -> Any:
        """One microbatch of one model chunk."""
        if vp_stage not in needs_of_stage:
            needs_of_stage[vp_stage] = needs_of_chunk(get_args(), vp_stage)
        fields = fields_of(next(data_iterator), needs_of_stage[vp_stage])
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
        needs: Of the chunk.

    Returns:
        By name: `tokens`, `position_ids`, `labels`, `loss_mask` where needed, and if packed `cu_seqlens`,
        `cu_seqlens_padded` (int32 [segments + 1]) and `max_seqlen` (int32 [1], on the CPU, so that Megatron's `.item()`
        waits for nothing).
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
    return fields


def _batched(name: str, value: Any) -> Any:
    """A field of the list: Megatron takes boundaries with a leading dimension, and squeezes it away."""
    return value.unsqueeze(0) if value is not None and name in ("cu_seqlens", "cu_seqlens_padded") else value


def _params(fields: dict[str, Any]) -> Any:
    """PackedSeqParams of a packed microbatch, None of a dense one."""
    if "cu_seqlens" not in fields:
        return None
    padded = fields["cu_seqlens_padded"]
    return params_of_boundaries(padded, padded, int(fields["max_seqlen"]))
