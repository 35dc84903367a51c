"""What `get_batch` gave to the model: every rank writes its slices of every microbatch, as lines of JSON.

In: a folder; torchmix's `get_batch` factory, as the patched script calls it. Out: `rank-R-PROCESS.jsonl`, a line for
each microbatch of training that a model chunk of this rank has taken:

    began          the iteration that training began with, in this process
    step           iteration of Megatron, from 0
    tp, cp, pp, dp, chunk   who took it; chunk is the virtual stage, 0 without
    tokens         ids on a first stage, else null; a flat list, the rank's CP slice
    labels, mask   on a last stage, else null
    boundaries     cu_seqlens_padded of a packed microbatch, else null
    cp_size        how many ranks share it, where microbatches differ in that, else null
    pictures       of a script that takes images: hashes of its pictures on a first stage, their number on a last one

Must hold: the record is taken behind torchmix, at the last place before the model: what is written is what is trained
on. Nothing is altered. Microbatches of evaluation, which run without gradients, are written with `step` null.

It wraps `torchmix.megatron_adapter.get_batch` before the script asks for it, so neither torchmix nor the script knows.

Cost: text of every id; for runs of some steps.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchmix.megatron_adapter as tmx


def enable(folder: Path) -> None:
    """Record every microbatch of this process into `folder`."""
    factory = tmx.get_batch

    def get_batch(script: dict[str, Any]) -> Callable[..., Any]:
        original = factory(script)
        write: Callable[[dict[str, Any]], None] | None = None
        args, began = None, 0

        def recorded(data_iterator: Any, *given: Any) -> Any:
            from megatron.training import get_args

            nonlocal args, began, write
            vp_stage = given[0] if len(given) == 1 else None
            batch = original(data_iterator, *given)
            write = write or _writer(folder)
            if get_args() is not args:  # training begins, or begins again in this process
                args, began = get_args(), get_args().iteration
            write({"began": began, **_place(vp_stage), **_fields(batch, script)})
            return batch

        return recorded

    tmx.get_batch = get_batch


def _writer(folder: Path) -> Callable[[dict[str, Any]], None]:
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank-{torch.distributed.get_rank()}-{os.getpid()}.jsonl").open("w", encoding="utf-8")

    def write(line: dict[str, Any]) -> None:
        file.write(json.dumps(line) + "\n")
        file.flush()  # a rank may be killed

    return write


def _place(vp_stage: int | None) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.training import get_args

    return {
        "step": get_args().curr_iteration if torch.is_grad_enabled() else None,
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "chunk": vp_stage or 0,
    }


def _fields(batch: Any, script: dict[str, Any]) -> dict[str, Any]:
    """By name, from any version's layout: each has tokens and so on in a place of its own."""
    names = _names_of_version(script, len(batch))
    named = dict(zip(names, batch, strict=True))
    if "packed_seq_params" in named:
        params = named["packed_seq_params"]
        boundaries = None if params is None else params.cu_seqlens_q_padded
        cp_size = getattr(params, "local_cp_size", None)
    else:
        boundaries = named["cu_seqlens_padded"]
        cp_size = named.get("local_cp_size")

    def flat(tensor: torch.Tensor | None) -> list[int] | None:
        return None if tensor is None else tensor.flatten().int().tolist()

    found = {
        "tokens": flat(named["tokens"]),
        "labels": flat(named["labels"]),
        "mask": flat(named["loss_mask"]),
        "boundaries": flat(boundaries),
        "cp_size": None if cp_size is None else int(cp_size),
    }
    return {**found, "pictures": _pictures(named["images"])} if "images" in named else found


def _pictures(images: torch.Tensor | None) -> list[str] | int | None:
    """Hashes of pictures, [pictures, 3, height, width]; how many there are, if they have no values."""
    if images is None or images.dim() < 4:
        return None if images is None else len(images)
    return [hash_of_picture(image) for image in images]


def hash_of_picture(image: torch.Tensor) -> str:
    """12 hex digits of a picture's float32 values."""
    return hashlib.sha256(image.cpu().contiguous().numpy().tobytes()).hexdigest()[:12]


def _names_of_version(script: dict[str, Any], fields: int) -> tuple[str, ...]:
    """The fields of a batch by their number: six up to core 0.17, seven in dev, ten from core 0.18 on."""
    if "DEFAULT_IMAGE_TOKEN_INDEX" in script:
        return ("tokens", "position_ids", "labels", "images", "loss_mask", "attention_mask", "packed_seq_params")
    if "BATCH_KEYS" in script:
        return tuple(script["BATCH_KEYS"])
    tuple_names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "packed_seq_params")
    list_names = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size")
    list_names += ("loss_mask", "max_seqlen", "position_ids", "tokens")
    return {6: tuple_names, 7: (*tuple_names, "padding_mask"), 10: list_names}[fields]
