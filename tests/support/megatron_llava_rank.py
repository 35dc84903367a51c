"""One real rank that gives a step to core's own LLaVA model, by core's own schedule.

    RANK=.. WORLD_SIZE=.. MASTER_..=.. python -m tests.support.megatron_llava_rank RECIPE OUT PP

What `get_batch` gives goes through the model as pretrain_vlm.py passes it on. Out: OUT/RANK.npz with what the model
made of it: the labels and loss mask of the language model on the last stage, and on the first one where the embeddings
of pictures stand, and these pictures.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.multimodal import llava_model, llava_spec
    from megatron.core.models.vision import clip_vit_model, vit_layer_specs
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

from tests.support import fake_megatron
from tests.support.example import example_module
from torchmix import megatron_adapter as tmx
from torchmix.recipe.load import load_recipe

SIDE, PATCH, MICRO_BATCH_SIZE, VOCABULARY = 16, 4, 2, 512
EMBEDDINGS = (SIDE // PATCH) ** 2


def get_batch(data_iterator: Any) -> Any:
    """Stands for the script's own."""
    raise AssertionError("the script's own get_batch is not to be called")


def forward_step(data_iterator: Any, model: Any) -> Any:
    """That of pretrain_vlm.py."""
    tokens, position_ids, labels, images, loss_mask, attention_mask, packed_seq_params = get_batch(data_iterator)
    output, loss_mask = model(
        images, tokens, position_ids, attention_mask, labels, loss_mask, packed_seq_params=packed_seq_params
    )
    return output, lambda output: ((output * loss_mask).sum(), {"loss": output})


class NoAttention(torch.nn.Module):
    """Gives its values: what is looked at is what the model makes of its batch. Core's own asks for a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[tokens, samples, heads, head_dim] -> [tokens, samples, heads * head_dim]."""
        return value.flatten(2)


def build_model(length: int, pp: int) -> Any:
    """A LLaVA of two layers; its encoder on the first stage."""
    warnings.filterwarnings("ignore", module=r"megatron\\..*")
    language, vision, projection = (
        TransformerConfig(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=32,
            num_attention_heads=2,
            pipeline_model_parallel_size=pp if of_language else 1,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            batch_p2p_comm=False,
        )
        for of_language in (True, False, False)
    )
    vision.vision_model_type = "clip"
    clip_vit_model.CLIPViTModel.__init__.__defaults__ = tuple(  # which gives torch's norm arguments of another
        WrappedTorchNorm if one is torch.nn.LayerNorm else one
        for one in clip_vit_model.CLIPViTModel.__init__.__defaults__
    )
    llava_spec.DotProductAttention = vit_layer_specs.DotProductAttention = NoAttention  # type: ignore[misc, assignment]
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    spec = llava_spec.decoder_model_with_local_default_spec(None, False)
    return llava_model.LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=spec,
        language_vocab_size=VOCABULARY,
        language_max_sequence_length=length,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=vit_layer_specs.get_vit_layer_with_local_spec(),
        drop_vision_class_token=True,
        vision_projection_config=projection,
        vision_projection_layer_spec=spec.submodules.mlp.submodules,
        pre_process=is_first,
        post_process=is_last,
        add_encoder=is_first,
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
    )


def watched(model: Any, seen: dict[str, list[Tensor]]) -> Any:
    """The model; it keeps what it makes of each microbatch."""
    expand = model._preprocess_data

    def preprocess(images: Tensor | None, texts: Tensor | None, *rest: Any) -> Any:
        found = expand(images, texts, *rest)
        embeddings, labels, mask = found[:3]
        if labels is not None:
            seen["labels"].append(labels), seen["mask"].append(mask)
        if embeddings is not None:
            marked, _, _ = expand(torch.ones_like(images), torch.zeros_like(texts), *rest)[:3]
            seen["is_image"].append(marked[..., 0].T)
        return found

    model._preprocess_data = preprocess
    model.model_type = ModelType.encoder_or_decoder
    if model.vision_model is not None:
        model.vision_model.register_forward_pre_hook(lambda _, given: seen["pictures"].append(given[0]))
    return model


def main(arguments: list[str]) -> None:
    recipe, out, pp = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    example_module("cpu").enable()
    torch.Tensor.cuda = lambda self: self  # type: ignore[assignment,method-assign]  # of the encoder's positions
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, pp)
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed = lambda *_: None  # there is no CUDA, and no dropout
    batch = load_recipe(recipe).batch
    dp = dist.get_world_size() // pp
    num_microbatches_calculator.init_num_microbatches_calculator(1, None, int(batch.samples), MICRO_BATCH_SIZE, dp)  # type: ignore[arg-type]
    args = fake_megatron.default_args(
        data_recipe=str(recipe),
        pipeline_model_parallel_size=pp,
        data_parallel_size=dp,
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=batch.samples,
        seq_length=EMBEDDINGS,
        encoder_seq_length=EMBEDDINGS,
        decoder_seq_length=batch.length,
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
    )
    seen: dict[str, list[Tensor]] = {name: [] for name in ("labels", "mask", "is_image", "pictures")}
    with fake_megatron.installed(args), torch.no_grad():
        script = SimpleNamespace(**globals())
        script.DEFAULT_IMAGE_TOKEN_INDEX = llava_model.DEFAULT_IMAGE_TOKEN_INDEX
        globals()["get_batch"] = tmx.get_batch(vars(script))
        model = watched(build_model(batch.length, pp), seen)
        train, _, _ = tmx.provider([0, 0, 0])
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=train,
            model=[model],
            num_microbatches=num_microbatches_calculator.get_num_microbatches(),
            seq_length=EMBEDDINGS,
            decoder_seq_length=batch.length,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=True,
        )
        tmx.close()
    np.savez(out / f"{dist.get_rank()}.npz", **{name: torch.cat(one).numpy() for name, one in seen.items() if one})
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
