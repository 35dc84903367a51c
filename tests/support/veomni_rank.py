"""A rank that trains by VeOmni's own TextTrainer on a CPU, with the example's dataloader, and saves what it trained on.

In: a recipe, a folder for checkpoints, samples of a microbatch, steps, the step of the checkpoint to go on from (0:
none), a file for the inputs, and the code of an edit. The model is VeOmni's Qwen3, tiny, with FSDP2. VeOmni has no
backend for a CPU: it is told gloo. torchvision, which it imports for videos, is a stand-in without content.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenizers
import torch
import transformers  # it looks for torchvision, and finds none

from tests.support.example import EXAMPLE, example_module

VOCABULARY, LENGTH, SAMPLES = 257, 32, 4
OPS = [
    f"{name}_implementation"
    for name in ("attn", "moe", "cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss")
]
SEEN: list[torch.Tensor] = []
ASKED_OF_A_GPU = {
    "empty_cache": None,
    "get_device_name": "cpu",
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "memory_stats": {"num_alloc_retries": 0},
}


class Empty(ModuleType):
    """A module in which any name is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandIns(MetaPathFinder, Loader):
    """Finds torchvision."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is made."""


def write_model(folder: Path) -> None:
    """The configuration and the vocabulary of a tiny model."""
    folder.mkdir(exist_ok=True)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen3Config(**sizes, **heads, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"none": 0}, unk_token="none"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def main(recipe: str, folder: str, size: str, steps: str, start: str, out: str, code: str) -> None:
    """Train, and save the inputs."""
    sys.meta_path.append(StandIns())
    for name, value in ASKED_OF_A_GPU.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)
    from veomni.utils import device

    device.get_dist_comm_backend = lambda: "gloo"
    from veomni.arguments import VeOmniArguments, parse_args
    from veomni.trainer import base

    base.get_dist_comm_backend = device.get_dist_comm_backend
    from veomni.trainer.text_trainer import TextTrainer

    os.environ["TORCHMIX_ACCEPT_EDIT"] = code
    if not code:
        del os.environ["TORCHMIX_ACCEPT_EDIT"]
    example_module("dataloader", EXAMPLE.parent / "veomni")
    model = Path(folder, f"model-{os.environ['RANK']}")
    write_model(model)
    asked = {
        "model": {"config_path": str(model), "ops_implementation": dict.fromkeys(OPS, "eager")},
        "data": {
            "train_path": str(Path(recipe).parent),
            "datasets_type": "torchmix",
            "data_type": "plaintext",
            "max_seq_len": LENGTH,
            "dataloader": {"type": "torchmix"},
        },
        "train": {
            "max_steps": int(steps),
            "num_train_epochs": 1,
            "dyn_bsz": False,
            "micro_batch_size": int(size),
            "global_batch_size": SAMPLES,
            "init_device": "meta",
            "checkpoint": {"output_dir": folder, "save_steps": 2, "save_hf_weights": False},
        },
    }
    if int(start):
        asked["train"]["checkpoint"]["load_path"] = f"{folder}/checkpoints/global_step_{start}"
    config = Path(folder, f"config-{os.environ['RANK']}.yaml")
    config.write_text(json.dumps(asked))
    sys.argv = ["train_text.py", str(config)]
    trainer = TextTrainer(parse_args(VeOmniArguments))
    trainer.base.model.register_forward_pre_hook(
        lambda _, __, given: SEEN.append(given["input_ids"].view(-1, LENGTH)), with_kwargs=True
    )
    trainer.train()
    torch.save(SEEN, f"{out}-{os.environ['RANK']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
