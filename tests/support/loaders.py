"""The loaders of a whole job inside one process, and what each rank was handed.

In: a recipe file, a job's sizes and how many microbatches to take. Out: a `Rank` for each rank, by global rank. The
exchange is the real one, over queues instead of gloo.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.templates import made_once
from tests.support.worlds import run_ranks
from torchmix.constructor.fields import Microbatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.fan_out import local_world
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.open import build_loader

FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "source_index", "cu_seqlens", "cu_seqlens_padded")


@dataclass(kw_only=True)
class Rank:
    """What one rank was handed."""

    microbatches: list[Microbatch] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Order digest after each whole step."""
    state: dict[str, Any] = field(default_factory=dict)
    """After the last microbatch."""
    result: Any = None


def write_job(
    directory: Path,
    *,
    seed: int = 5,
    samples: int | str = 8,
    length: int = 64,
    method: str = "best_fit",
    boundaries: str = "document",
    overflow: str = "split",
    extra: str = "",
    checksums: bool = False,
) -> Path:
    """Files of four sources of different kinds, their recipe and their catalog; the recipe's path.

    `samples` is as in YAML: a number, or a ramp; `extra` is more of the recipe.
    """
    shutil.copytree(
        _job(seed, checksums, samples, length, method, boundaries, overflow, extra), directory, dirs_exist_ok=True
    )
    return directory / "recipe.yaml"


@made_once
def _files(directory: Path, seed: int, checksums: bool) -> None:
    documents = random_tokens(seed, 900, mean_tokens=40)
    make_tokens_file(directory / "web-0.parquet", documents, codec="zstd", checksums=checksums)
    make_tokens_file(directory / "web-1.parquet", random_tokens(seed + 1, 500, mean_tokens=90), page_index=False)
    make_text_file(directory / "prose.parquet", random_texts(seed + 2, 700), page_version="2.0", codec="snappy")
    make_text_file(directory / "tiny.parquet", random_texts(seed + 3, 9, mean_words=20), codec="none")


@made_once
def _job(
    directory: Path,
    seed: int,
    checksums: bool,
    samples: int | str,
    length: int,
    method: str,
    boundaries: str,
    overflow: str,
    extra: str,
) -> None:
    shutil.copytree(_files(seed, checksums), directory, dirs_exist_ok=True)
    path = directory / "recipe.yaml"
    path.write_text(
        f"""
version: 1
seed: {seed}
batch: {{samples: {samples}, length: {length}}}
sources:
  web: {{path: "web-*.parquet", tokens: input_ids}}
  prose: {{path: prose.parquet, text: text, tokenizer: bytes}}
  tiny: {{path: tiny.parquet, text: text, tokenizer: bytes}}
mixture: {{web: 60%, prose: 38%, tiny: 2%}}
packing: {{method: {method}, overflow: {overflow}, boundaries: {boundaries}, align_tokens: 8}}
balance: {{method: rows, model: {{layers: 4, hidden: 64, ffn: 256, heads: 4}}}}
shuffle: {{window_pages: 3, window_bytes: 64KiB}}
{extra}
"""
    )
    index_recipe(load_recipe(path), recipe_directory(path))


def open_job(
    recipe: Path, topology: Topology | ClientPlaceTree, *, group_ranks: int | None = None, **options: Any
) -> list[StatefulDataLoader]:
    """The loaders of all ranks, joined by an exchange inside this process; `group_ranks` as in `local_world`."""
    world_size = topology.world_size if isinstance(topology, Topology) else topology.topology.world_size
    ends = local_world(topology, group_ranks=group_ranks) if world_size > 1 or group_ranks else [None]
    return [
        build_loader(recipe, topology=topology.with_rank(rank), fan_out=end, **{"loaders": "in_process", **options})
        for rank, end in enumerate(ends)
    ]


def run_job(
    recipe: Path,
    topology: Topology | ClientPlaceTree,
    *,
    microbatches: int | None = None,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    keep: bool = True,
    program: Callable[[StatefulDataLoader, Rank], None] | None = None,
    **options: Any,
) -> list[Rank]:
    """Run every rank for some microbatches or whole steps, or a `program` of the caller's; close all."""

    def consume(loader: StatefulDataLoader) -> Rank:
        rank = Rank()
        with loader:
            if state is not None:
                loader.load_state_dict(state)
            if program is not None:
                program(loader, rank)
            else:
                take(loader, rank, microbatches, steps=steps, keep=keep)
            rank.state = loader.state_dict()
        return rank

    return run_ranks(open_job(recipe, topology, **options), consume, deadline_s=120)


def take(
    loader: StatefulDataLoader, rank: Rank, count: int | None, *, steps: int | None = None, keep: bool = True
) -> None:
    """Take `count` microbatches, or those of `steps` steps, or all there are."""
    for microbatch in islice(iter(loader), count):
        if keep:
            rank.microbatches.append(microbatch)
        if microbatch.is_last_of_step:
            rank.digests.append(loader.order_digest)
            if len(rank.digests) == steps:
                return


def same_tensors(one: Microbatch, other: Microbatch) -> bool:
    """Whether all fields, their dtypes and their numbers are equal."""
    for name in FIELDS:
        first, second = getattr(one, name), getattr(other, name)
        if (first is None) != (second is None):
            return False
        if first is not None and (first.dtype != second.dtype or not torch.equal(first, second)):
            return False
    numbers = ("step", "index", "is_last_of_step", "num_tokens_global", "max_seqlen")
    return all(getattr(one, name) == getattr(other, name) for name in numbers)


def documents_in(path: Path, column: str) -> list[Any]:
    """The whole column of a file, as Python values."""
    return list(pq.read_table(path)[column].to_pylist())


def same_microbatches(some: Sequence[Microbatch], others: Sequence[Microbatch]) -> bool:
    """Whether both are as many, and equal one by one."""
    return len(some) == len(others) and all(same_tensors(one, other) for one, other in zip(some, others, strict=True))
