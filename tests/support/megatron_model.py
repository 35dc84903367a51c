"""A small GPT of megatron-core whose weights do not depend on the layout, for CPU ranks.

In: the layout of `parallel_state`. Out: the chunks of this rank, as Megatron's schedules take them. Each weight is made
whole from its global name and then cut for the tensor-parallel rank, so losses are comparable across layouts. Attention
stays inside documents where there are boundaries, and inside samples where there are none.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tests.support.example import example_module

HEADS = 8
HIDDEN = 32
VOCABULARY = 512


def build_chunks(*, layers: int, length: int, packed: bool, vp: int | None) -> list[torch.nn.Module]:
    """The model chunks of this rank.

    Args:
        layers: The layers of the model, over all chunks.
        length: Tokens of a sample.
        packed: Whether the batches have boundaries of documents.
        vp: Virtual pipeline stages of each rank; None for none.
    """
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=vp,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = functools.partial(_attention, length, packed)
    chunks: list[torch.nn.Module] = []
    for stage in range(vp or 1):
        vp_stage = stage if vp else None
        virtual: dict[str, Any] = {"ignore_virtual": vp is None, "vp_stage": vp_stage}
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=length,
            position_embedding_type="learned_absolute",
            pre_process=parallel_state.is_pipeline_first_stage(**virtual),
            post_process=parallel_state.is_pipeline_last_stage(**virtual),
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
        )
        chunk.vp_stage = vp_stage
        _set_weights(chunk)
        chunks.append(chunk)
    return chunks


def _set_weights(chunk: torch.nn.Module) -> None:
    """Fill every weight from its global name."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    number_of_layer = {
        f"decoder.layers.{i}.": f"decoder.layers.#{layer.layer_number}."
        for i, layer in enumerate(chunk.decoder.layers)  # type: ignore[union-attr, arg-type]
    }
    for name, weight in chunk.named_parameters():
        whole_name = re.sub(r"^decoder\.layers\.\d+\.", lambda match: number_of_layer[match[0]], name)
        shape, dim = list(weight.shape), -1
        if getattr(weight, "tensor_model_parallel", False):
            dim = weight.partition_dim  # type: ignore[attr-defined]
            shape[dim] *= tp
        seed = int.from_bytes(hashlib.sha256(whole_name.encode()).digest()[:7], "little")
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
        if "layernorm" in name and name.endswith("weight"):
            whole += 1
        with torch.no_grad():
            weight.copy_(whole if dim < 0 else whole.chunk(tp, dim)[tp_rank])


def _attention(length: int, packed: bool, *arguments: Any, **named: Any) -> torch.nn.Module:
    attention = example_module("attention")
    inner = attention.DocumentAttention(*arguments, length=length, slices="document" if packed else "sample", **named)
    return inner if packed else DenseAttention(inner)


class DenseAttention(torch.nn.Module):
    """The example's attention over whole samples, for [tokens, samples, heads, head_dim] without boundaries."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any) -> Tensor:
        assert attention_mask is None
        samples = query.size(1)
        cu_seqlens = torch.arange(samples + 1, dtype=torch.int32) * self.inner.length
        rows = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)]
        named["packed_seq_params"] = _Boundaries(cu_seqlens)
        out = self.inner(*rows, None, **named)
        return out.view(samples, -1, out.size(-1)).transpose(0, 1).contiguous()


class _Boundaries:
    def __init__(self, cu_seqlens: Tensor) -> None:
        self.cu_seqlens_q_padded = cu_seqlens
