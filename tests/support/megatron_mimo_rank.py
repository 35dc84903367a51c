"""One real rank that gives a step to core's own MimoModel, as examples/mimo/train.py does.

    RANK=.. WORLD_SIZE=.. MASTER_..=.. python -m tests.support.megatron_mimo_rank RECIPE OUT

All ranks share the model by tensor parallelism. Out: OUT/RANK.npz with what the model made of each microbatch: what its
language model took (embeddings, labels, and the loss mask that the loss had), what its encoder took (pictures), and
what was made of them (rows); the language model's embedding of each token (table); and the losses by source (line).
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.models.multimodal import llava_spec
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.support.megatron_llava_rank import MICRO_BATCH_SIZE, PATCH, VOCABULARY, NoAttention

from tests.support import fake_megatron
from tests.support.example import example_module
from torchmix import megatron_adapter as tmx
from torchmix.recipe.load import load_recipe

HIDDEN = 32
seen: dict[str, list[Tensor]] = {name: [] for name in ("embeddings", "labels", "mask", "pictures", "rows")}


# --- The script, as in each version from core 0.16 to main.


def get_batch(data_iterator: Any) -> Any:
    """Stands for the script's own."""
    raise AssertionError("the script's own get_batch is not to be called")


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> Any:
    """That of train.py, without its report."""
    losses, loss_mask = output_tensor.float(), loss_mask.contiguous().view(-1).float()
    return torch.sum(losses.view(-1) * loss_mask), loss_mask.sum()


def forward_step(data_iterator: Any, model: Any) -> Any:
    """That of train.py."""
    data_batch = get_batch(data_iterator)
    output_tensor, loss_mask = model(**data_batch)
    return output_tensor, partial(loss_func, loss_mask)


def model_provider(pre_process: bool = True, post_process: bool = True, image_special_token_id: int = 32000) -> Any:
    """A model of the parts of train.py's `llava_vlm`, of two layers, and with an encoder of its own."""
    language, projection = (
        TransformerConfig(
            num_layers=2,
            hidden_size=HIDDEN,
            ffn_hidden_size=HIDDEN,
            num_attention_heads=2,
            tensor_model_parallel_size=dist.get_world_size(),
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        for _ in range(2)
    )
    llava_spec.DotProductAttention = NoAttention  # type: ignore[misc, assignment]
    layer = llava_spec.decoder_model_with_local_default_spec(None, False)
    vision = ModuleSpec(
        module=VisionModalitySubmodules,
        params={},
        submodules={
            "encoders": {"clip_encoder": ModuleSpec(module=Patches)},
            "input_projections": [
                ModuleSpec(
                    module=MultimodalProjector,
                    params={
                        "config": projection,
                        "submodules": layer.submodules.mlp.submodules,
                        "projector_type": "mlp",
                        "input_size": HIDDEN,
                    },
                )
            ],
        },
    )
    words = {
        "config": language,
        "transformer_layer_spec": layer,
        "vocab_size": VOCABULARY,
        "max_sequence_length": 4096,
        "pre_process": pre_process,
        "post_process": post_process,
        "position_embedding_type": "rope",
    }
    return MimoModel(
        MimoModelConfig(
            language_model_spec=ModuleSpec(module=GPTModel, params=words),
            modality_submodules_spec={"images": vision},
            special_token_ids={"images": image_special_token_id},
        )
    )


class Patches(torch.nn.Module):
    """Stands for CLIP of Hugging Face: an embedding of each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Conv2d(3, HIDDEN, PATCH, PATCH)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[pictures, 3, height, width] -> [pictures, patches, width of an embedding]."""
        seen["pictures"].append(pixel_values)
        return self.encode(pixel_values).flatten(2).transpose(1, 2)


# --- What it makes of a step.


def watched(model: Any) -> Any:
    """The model; it keeps what its parts take."""

    def keep(_: Any, __: Any, named: dict[str, Any]) -> None:
        seen["embeddings"].append(named["decoder_input"].transpose(0, 1))
        seen["labels"].append(named["labels"])

    model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    images = model.modality_submodules.images
    encode = images.forward  # which the model calls by this name, past hooks

    def forward(**named: Any) -> Tensor:
        seen["rows"].append(encode(**named))
        return seen["rows"][-1]

    images.forward = forward
    return model


def run_step(script: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """A step of a script, from its `globals()`: what was seen of it, and the lines of its log.

    Args:
        script: It has `get_batch`, `forward_step`, `loss_func` and `model_provider`.
        recipe: Its file.
    """
    example_module("cpu").enable()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed = lambda *_: None  # there is no CUDA, and no dropout
    batch, lines = load_recipe(recipe).batch, fake_megatron.Lines()
    num_microbatches_calculator.init_num_microbatches_calculator(1, None, int(batch.samples), MICRO_BATCH_SIZE, 1)  # type: ignore[arg-type]
    args = fake_megatron.default_args(
        data_recipe=str(recipe),
        tensor_model_parallel_size=dist.get_world_size(),
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=batch.samples,
        seq_length=batch.length,
        model_provider="llava_vlm",
        log_interval=1,
    )
    with fake_megatron.installed(args, lines=lines):
        script["get_batch"] = tmx.get_batch(script)
        train, _, _ = tmx.provider([0, 0, 0])
        model = watched(script["model_provider"]())
        model.language_model.requires_grad_(
            False
        )  # as train.py does, with the encoder: the projection alone is trained
        model.modality_submodules.images.encoders.requires_grad_(False)
        for _ in range(num_microbatches_calculator.get_num_microbatches()):
            output, loss_of = script["forward_step"](train, model)
            loss_of(output)[0].backward()
            seen["mask"].append(loss_of.args[0])
        tmx.close()
    table = model.language_model.embedding(torch.arange(VOCABULARY)[None], None)[:, 0]
    found = {name: torch.cat(one).detach().numpy() for name, one in seen.items()}
    return {**found, "table": table.detach().numpy(), "lines": np.array(lines)}


def main(arguments: list[str]) -> None:
    recipe, out = Path(arguments[0]), Path(arguments[1])
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    found = run_step(globals(), recipe)
    np.savez(out / f"{dist.get_rank()}.npz", **found)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
