"""A rank that trains by torchtitan's own Trainer on a CPU, with the example's dataloader, and saves what it trained on.

In: a recipe, a folder for checkpoints, samples of a microbatch, steps, the step of the checkpoint that is there, a file
for the inputs, and the code of an edit. The model has one token of context. torchtitan asks for a GPU: it is told that
the CPU is its device, and what it asks of it beyond that has stubs. It is torchtitan 0.3, or main of August 2026.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
NOTHING: Any = lambda *_, **__: None  # noqa: E731
for _name, _made in {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": NOTHING,
    "empty_cache": NOTHING,
}.items():
    setattr(torch.cpu, _name, _made)

try:
    from torchtitan.components.checkpoint import CheckpointManager
except ImportError:  # main
    from torchtitan.components.checkpointer.dcp import CheckpointManager

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as _distributed  # noqa: E402
from torchtitan.models.common import Embedding, Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tests.support.example import EXAMPLE, example_module  # noqa: E402

_distributed.set_pg_timeouts = NOTHING  # a barrier of a device that gloo does not take
VOCABULARY, WIDTH, LENGTH, SAMPLES = 257, 8, 32, 4
SEEN: list[torch.Tensor] = []


class Toy(BaseModel):
    """A table and a head."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Nothing to choose."""

        def update_from_config(self, **_: Any) -> None:
            """Nothing follows from the job."""

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            """Parameters, and one operation."""
            return sum(each.numel() for each in model.parameters()), 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        init = {"weight": torch.nn.init.normal_, "bias": torch.nn.init.zeros_}
        self.table = Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=init).build()
        self.head = Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=init).build()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert positions.shape == tokens.shape
        SEEN.append(torch.tensor(tokens.tolist()))  # without torchtitan's types of tensors
        out: torch.Tensor = self.head(self.table(tokens))
        return out


class Tokenizer(BaseTokenizer):
    """torchtitan wants one; nothing asks it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError

    decode = get_vocab_size = encode


def parallelized(model: torch.nn.Module, *, parallel_dims: Any, **_: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = parallel_dims.get_optional_mesh("dp_shard")
    return fully_shard(model, mesh=mesh) if mesh is not None else model


def main(recipe: str, folder: str, size: str, steps: str, start: str, out: str, code: str) -> None:
    """Train, and save the inputs; torchtitan goes on from the newest checkpoint in the folder."""
    module = example_module("dataloader", EXAMPLE.parent / "torchtitan")
    sizes = {"local_batch_size": int(size), "global_batch_size": SAMPLES, "seq_len": LENGTH}
    if "max_context_length" in TrainingConfig.__dataclass_fields__:  # main
        sizes = {
            "num_tokens_per_microbatch_per_dp_rank": int(size) * LENGTH,
            "num_tokens_per_train_step": SAMPLES * LENGTH,
            "max_context_length": LENGTH,
        }
    trainer = Trainer.Config(
        model_spec=ModelSpec("toy", "toy", Toy.Config(), parallelized, None, None, None),
        dump_folder=folder,
        tokenizer=Tokenizer.Config(),
        dataloader=module.TorchmixDataLoader.Config(recipe=recipe, accept_edit=code or None),
        optimizer=default_adamw(lr=1e-3),
        loss=CrossEntropyLoss.Config(),
        training=TrainingConfig(steps=int(steps), disable_cuda_graphs=True, **sizes),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
    ).build()
    assert start == "0" or Path(folder, "checkpoint", f"step-{start}").is_dir()
    trainer.train()
    torch.save(SEEN, f"{out}-{os.environ['RANK']}")
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
