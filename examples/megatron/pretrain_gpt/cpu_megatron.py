"""What of Megatron-LM needs a GPU, replaced where there is none: its attention, and what it compiles at start.

In: a process in which `cpu_device.enable()` ran. Out: after `enable()`, the local implementation has an attention that
knows documents and context parallelism, and nothing is compiled at start.

Must hold: the attention computes what Transformer Engine's computes: causal inside each document when the microbatch
carries boundaries, over the whole sample when it does not. Megatron's own local attention refuses context parallelism
and boundaries. `attention.py` of the example above this one is used as it is.

Megatron compiles index builders of its own data sets with `make`, inside the checkout, and fused kernels with nvcc.
This run uses neither, and a checkout should stay as it was fetched. It also calls its fused functions once, to have
them compiled; they draw dropout, on a CPU from the generator of the initial weights, which would then depend on the
layout.

Cost: the attention is dense, samples * length * length scores for each head: for tests, not for training.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from attention import DocumentAttention


def enable() -> None:
    """Replace them; Megatron is imported here."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.training import initialize

    initialize._compile_dependencies = lambda *args, **options: None
    initialize._warmup_jit_function = lambda *args, **options: None
    LocalSpecProvider.core_attention = lambda self: CpuAttention
    _attend_in_llava()
    _keep_logits_of_students()
    _have_a_version_of_transformer_engine()
    _restart_without_a_device()


def _attend_in_llava() -> None:
    """LLaVA names its attention itself, and with sequence parallelism asks for Transformer Engine's, and for norms
    whose gradients are summed over tensor-parallel ranks, which those of torch are not by themselves. Its encoder gives
    a norm of torch arguments that this does not have."""
    from megatron.core.models.multimodal import llava_model, llava_spec
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    llava_spec.DotProductAttention = llava_model.TEDotProductAttention = CpuAttention
    llava_model.HAVE_TE = True
    made = WrappedTorchNorm.__new__

    def norm(kind: type, config: Any, *rest: Any, **named: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        found: torch.nn.Module = made(kind, plain, *rest, **named)
        for weight in found.parameters():
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return found

    WrappedTorchNorm.__new__ = norm
    norms = {torch.nn.LayerNorm: WrappedTorchNorm}
    CLIPViTModel.__init__.__defaults__ = tuple(norms.get(one, one) for one in CLIPViTModel.__init__.__defaults__)


def _have_a_version_of_transformer_engine() -> None:
    """Dev asks for 2.9, whose kernels would compute what `CpuAttention` does here, where microbatches are scheduled."""
    from megatron.core.transformer import transformer_config

    known = getattr(transformer_config, "is_te_min_version", None)
    if known is not None:
        transformer_config.is_te_min_version = lambda version, *rest, **named: (
            version == "2.9.0" or known(version, *rest, **named)
        )


def _restart_without_a_device() -> None:
    """In-process restarts wait for the device of the rank, whose number torch refuses here, and abort NCCL."""
    try:
        from nvidia_resiliency_ext.inprocess import abort, finalize, health_check
    except ImportError:
        return
    for module in (finalize, health_check):
        module.torch = SimpleNamespace(cuda=torch.cuda, device=lambda number: torch.device("cpu"))
    abort.AbortTorchDistributed.shutdown_all_process_group_backends = staticmethod(_abort_gloo)


def _abort_gloo() -> None:
    """End what waits in any group of this process, as NCCL's abort does: gloo's connections are shut down."""
    of_stores = {int(os.environ["MASTER_PORT"]) + number for number in range(3)}  # Megatron's, and that of restarts
    for file in [*Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                ports = {end[1] for end in (connection.getsockname(), connection.getpeername())}
                if not ports & of_stores:
                    connection.shutdown(socket.SHUT_RDWR)


def _keep_logits_of_students() -> None:
    """Distillation subtracts in place from `logits.float()`: a copy where they are bfloat16, here the logits."""
    try:
        from megatron.training.distillation.cached_logits_loss import StudentLogitsCapture
    except ModuleNotFoundError:  # core 0.18 and older
        return
    capture = StudentLogitsCapture._capture_logits

    def capture_copy(self: Any, module: Any, given: Any, output: Any) -> None:
        capture(self, module, given, output[0].clone() if isinstance(output, tuple) else output.clone())

    StudentLogitsCapture._capture_logits = capture_copy


class CpuAttention(DocumentAttention):
    """`DocumentAttention` for samples of `--seq-length` tokens, packed or not.

    Packed, tokens come as [tokens, heads, head_dim] with boundaries; else as [length / cp, samples, heads, head_dim].
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        from megatron.training import get_args

        length = get_args().decoder_seq_length or get_args().seq_length  # pretrain_vlm.py has the first
        super().__init__(*args, length=length, slices="document", **options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """[tokens, heads, head_dim] -> [tokens, heads * head_dim]; dense: [length / cp, samples, heads * head_dim]."""
        if options.get("packed_seq_params") is not None:
            return super().forward(query, key, value, *args, **options)
        length, samples = query.shape[:2]
        boundaries = torch.arange(samples + 1, dtype=torch.int32) * (length * self.group.size())
        options["packed_seq_params"] = SimpleNamespace(cu_seqlens_q_padded=boundaries)
        out = super().forward(_by_sample(query), _by_sample(key), _by_sample(value), *args, **options)
        return out.view(samples, length, -1).transpose(0, 1).contiguous()


def _by_sample(field: Tensor) -> Tensor:
    """[length, samples, heads, head_dim] -> [samples * length, heads, head_dim]."""
    return field.transpose(0, 1).reshape(-1, *field.shape[2:])
