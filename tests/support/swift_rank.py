"""A rank that takes its microbatches by ms-swift's own code for Megatron, with the example, and saves what it got.

In: a recipe, a folder for checkpoints, samples of a microbatch, steps, the step of the checkpoint to go on from (0:
none), a file for the inputs, and the code of an edit. ms-swift imports Transformer Engine, which needs a GPU: here it
is a stand-in without content. So there is no model, and nothing is trained. The iterator and `get_batch` run, with what
they do for stages, packed documents and CP, and `save_checkpoint` without the model's files.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peft  # it looks for Transformer Engine, and finds none
import torch

from tests.support.example import EXAMPLE, example_module

VERSION = "2.8.0"
SAMPLES, LENGTH = 4, 32


class AnyClass(type):
    """Has any attribute, which is such a class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (), {"__init__": lambda *_, **__: None})


class Engine(ModuleType):
    """A module of Transformer Engine, in which any name is a class."""

    __path__ = ()
    __version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (), {"__init__": lambda *_, **__: None})


class StandIns(MetaPathFinder, Loader):
    """Finds Transformer Engine."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0].startswith("transformer_engine") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Engine(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is made."""


def main(recipe: str, folder: str, size: str, steps: str, start: str, out: str, code: str) -> None:
    """Take the microbatches of the steps, and save their inputs."""
    sys.meta_path.append(StandIns())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        VERSION if name.startswith("transformer") and "engine" in name else version(name)
    )
    os.environ |= {"TORCHMIX_ACCEPT_EDIT": code} if code else {}
    module = example_module("pretrain", EXAMPLE.parent / "ms_swift")
    from swift.megatron.trainers.base import BaseMegatronTrainer

    torch.distributed.init_process_group("gloo")
    module.mpu.initialize_model_parallel()
    BaseMegatronTrainer.save_checkpoint = lambda self: Path(folder, f"checkpoint-{self.state.iteration}").mkdir(
        exist_ok=True
    )
    trainer = module.TorchmixTrainer.__new__(module.TorchmixTrainer)
    num_microbatches = SAMPLES // (int(size) * torch.distributed.get_world_size())
    trainer.args = SimpleNamespace(
        global_batch_size=SAMPLES,
        micro_batch_size=int(size),
        virtual_pipeline_model_parallel_size=None,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        train_iters=int(steps),
        mcore_model=f"{folder}/checkpoint-{start}" if int(start) else None,
        finetune=False,
        padding_free=True,
        task_type="causal_lm",
        output_dir=folder,
    )
    trainer.state = SimpleNamespace(iteration=int(start))
    iterator, _ = trainer._prepare_data_iterator(Path(recipe))
    seen = []
    while trainer.state.iteration < int(steps):
        for _ in range(num_microbatches):
            batch = trainer.get_batch(iterator)
            assert batch["packed_seq_params"].cu_seqlens_q[-1] == batch["input_ids"].numel() == int(size) * LENGTH
            ids, labels = batch["input_ids"][0], batch["labels"][0]
            has_next = (labels[:-1] >= 0) & (batch["position_ids"][0, 1:] > 0)
            assert (labels[:-1] == ids[1:])[has_next].all() and has_next.any()
            seen.append(ids.view(-1, LENGTH))
        trainer.state.iteration += 1
    trainer.save_checkpoint()
    torch.distributed.barrier()
    trainer.loader.close()
    torch.save(seen, f"{out}-{os.environ['RANK']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    assert peft.__version__
    main(*sys.argv[1:])
