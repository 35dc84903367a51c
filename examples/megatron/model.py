"""The GPT of the example: megatron-core's own model, data parallelism and optimizer, sized by the recipe.

In: the recipe (length of a sample, packing, and the model's dimensions, the same that balance the batch), the layout
of `parallel_state`, and the device. Out: one chunk of `GPTModel` in Megatron's DDP, and its optimizer.

Must hold: nothing depends on the layout except which weights a rank holds. So a checkpoint of one layout loads at
another, and the padded vocabulary is the same for every tp: padded logits take part in the softmax, and losses would
differ.

Cost: 0.9 million parameters with the recipe of this example.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch
from attention import DocumentAttention, Slices
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from torchmix.errors import RecipeError
from torchmix.recipe.structs import Recipe

BYTES_VOCABULARY = 257
"""UTF-8 bytes, and 256 at the end of a document."""
VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this: every tp that divides it gives the same padded size."""


def slices_of(recipe: Recipe) -> Slices:
    """What context parallelism cuts one by one: documents where packing aligned them, else whole samples."""
    packing = recipe.packing
    return "document" if packing.method == "best_fit" and packing.boundaries == "document" else "sample"


def build_model(recipe: Recipe, device: torch.device) -> list[DistributedDataParallel]:
    """Build this rank's part of the model.

    Args:
        recipe: Gives `batch.length`, `packing`, and `balance.model`, the dimensions.
        device: Where the weights live.

    Returns:
        A list of one chunk, as Megatron's schedules take it.

    Raises:
        RecipeError: The recipe names no dimensions.
    """
    dimensions = recipe.balance.model
    if dimensions is None:
        raise RecipeError("is missing: the example trains the model that the batch is balanced for", "balance.model")
    engine = use_transformer_engine(recipe)
    dtype = torch.bfloat16 if engine else torch.float32
    config = TransformerConfig(
        num_layers=dimensions.layers,
        hidden_size=dimensions.hidden,
        ffn_hidden_size=dimensions.ffn,
        num_attention_heads=dimensions.heads,
        num_query_groups=dimensions.kv_heads or dimensions.heads,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=engine,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The loss is a sum over tokens, divided once by the tokens of the whole global batch: a mean of microbatch
        # means would weigh tokens by how they were packed.
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        # What a machine without a GPU cannot do: initialise there, fuse kernels, batch messages between stages.
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
    )
    if engine:
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = functools.partial(
            DocumentAttention, length=recipe.batch.length, slices=slices_of(recipe)
        )
    vocabulary = max(BYTES_VOCABULARY, dimensions.vocab or recipe.vocab_size or 0)
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        max_sequence_length=recipe.batch.length,
        position_embedding_type="learned_absolute",  # by the position_ids that torchmix counts in each document
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(device)
    if engine:
        model = Float16Module(config, model)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    chunk.broadcast_params()
    return [chunk]


def build_optimizer(model: list[DistributedDataParallel], *, learning_rate: float) -> Any:
    """Megatron's Adam over the chunks, gradients clipped to norm 1."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate,
        weight_decay=0.01,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=model[0].config.bf16,
        params_dtype=model[0].config.params_dtype,
    )
    return get_megatron_optimizer(config, model)


def use_transformer_engine(recipe: Recipe) -> bool:
    """Whether Transformer Engine computes the attention.

    It cuts packed documents one by one under context parallelism, so it cannot take samples that are cut as a whole
    although they hold several documents.
    """
    if not torch.cuda.is_available() or find_spec("transformer_engine") is None:
        return False
    cut_across = slices_of(recipe) == "sample" and recipe.packing.boundaries == "document"
    return not (cut_across and parallel_state.get_context_parallel_world_size() > 1)
