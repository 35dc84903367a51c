"""A job of one rank that meets torchmix through Megatron's provider: its recipes, its process group, its loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from tests.support.fake_megatron import default_args
from tests.support.loaders import write_job
from torchmix import megatron_adapter as tmx
from torchmix.megatron_adapter import vision
from torchmix.megatron_adapter.batch import losses_of_part, scripts_with_losses

SAMPLES, LENGTH = 8, 64


def write_recipes(folder: Path) -> Path:
    """Recipes: plain, split into three parts, and with a ramp; their folder."""
    plain = write_job(folder, samples=SAMPLES, length=LENGTH).read_text()
    (folder / "recipe.yaml").write_text(plain)
    (folder / "split.yaml").write_text(plain + "split: [60, 20, 20]\n")
    ramp = "samples: [{from_step: 0, samples: 4}, {from_step: 2, samples: 8}]"
    (folder / "ramp.yaml").write_text(plain.replace(f"samples: {SAMPLES}", ramp))
    return folder


@contextmanager
def job_of_one_rank() -> Iterator[None]:
    """A process group of one rank, and nothing of the provider left behind."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        tmx.close()
        dist.destroy_process_group()
        losses_of_part.clear()
        scripts_with_losses.clear()
        vision.at_hand = None


class Run:
    """Megatron's loop, as far as data go."""

    def __init__(self, args: SimpleNamespace, num_chunks: int = 1) -> None:
        self.args = args
        stages = range(num_chunks) if num_chunks > 1 else [None]
        self.chunks = [tmx.provider([0, 0, 0], vp_stage=stage) for stage in stages]
        self.train = [chunk[0] for chunk in self.chunks]

    def step(self, num_microbatches: int = SAMPLES) -> list[tuple[int, int]]:
        """One step of all chunks; what was seen."""
        seen = []
        for iterator in self.train:
            items = [next(iterator) for _ in range(num_microbatches)]
            seen = [(item["step"], item["index"]) for item in items]
            assert items[-1]["is_last_of_step"]
            self.tokens = [item["tokens"] for item in items]
        self.args.consumed_train_samples += num_microbatches
        return seen


def args_for(recipe: Path, **changes: Any) -> SimpleNamespace:
    return default_args(**{"data_recipe": str(recipe), "global_batch_size": SAMPLES, "seq_length": LENGTH, **changes})
