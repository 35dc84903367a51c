"""Layouts of a job as text, all layouts of a number of ranks, a recipe for them, a digest of what a rank was handed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.files import make_text_file, random_texts

SAMPLES, LENGTH = 8, 64
SEED = 20_261_121
MOST_CHUNKS = 8
"""In a pipeline, over all its stages."""
FEWEST_LAYERS = 2


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and which script's `get_batch` is stood in for."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    vp: int = 0
    """Virtual stages of each rank; 0 for none."""
    steps: int = 2
    script: str = "0.20"
    resume: int = 0
    """1: go on from the state that the layout before has left, as if it were loaded from a checkpoint."""
    rerun: int = 0
    """1: Megatron's rerun state machine has each first step run again."""
    forward_only: int = 0
    """1: no backward; what is handed out, and the loss, are the same."""
    passes: int = 0
    """How often all of validation is evaluated, after training."""
    runs: int = 0
    """1: bins of several sizes for --hybrid-context-parallel; 2: for what dev calls at each step."""
    layers: int = 0
    """The model has this many; 0 for a layer in each chunk, but no fewer than 2."""

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def num_layers(self) -> int:
        return self.layers or max(FEWEST_LAYERS, self.pp * (self.vp or 1))

    @property
    def name(self) -> str:
        """All values as text, for a command line."""
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in self.__dataclass_fields__)


def layout_of(name: str) -> Layout:
    """The inverse of `Layout.name`."""
    values = dict(part.split("=") for part in name.split(","))
    return Layout(**{axis: value if axis == "script" else int(value) for axis, value in values.items()})  # type: ignore[arg-type]


def layouts_of(world_size: int, **options: Any) -> list[Layout]:
    """Every layout over tp, cp, pp and dp of so many ranks, and with 2 virtual stages where there is a pipeline."""
    sizes = [size for size in (1, 2, 4, 8) if size <= world_size]
    layouts = []
    for tp, cp, pp in product(sizes, repeat=3):
        dp, rest = divmod(world_size, tp * cp * pp)
        if dp and not rest:
            for vp in (0, 2):
                if not vp or (pp > 1 and vp * pp <= MOST_CHUNKS):
                    layouts.append(Layout(tp=tp, cp=cp, pp=pp, dp=dp, vp=vp, **options))
    return layouts


def digest_of(fields: dict[str, Any]) -> str:
    """16 hex digits over names and numbers of what is not None, in the order of names; shapes do not count."""
    digest = hashlib.sha256()
    for name in sorted(fields):
        if fields[name] is not None:
            digest.update(name.encode())
            digest.update(np.asarray(fields[name], np.float64).tobytes())
    return digest.hexdigest()[:16]


def write_bytes_job(folder: Path, *, boundaries: str, align_tokens: int = 16, extra: str = "") -> Path:
    """Two sources of text and their recipe, named after its boundaries; not indexed. `extra` is added to the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    make_text_file(folder / "long.parquet", random_texts(SEED, 300, mean_words=30))
    make_text_file(folder / "short.parquet", random_texts(SEED + 1, 400, mean_words=4))
    path = folder / f"{boundaries}.yaml"
    path.write_text(
        f"""
version: 1
seed: 7
batch: {{samples: {SAMPLES}, length: {LENGTH}}}
sources:
  long: {{path: long.parquet, text: text, tokenizer: bytes}}
  short: {{path: short.parquet, text: text, tokenizer: bytes}}
mixture: {{long: 60%, short: 40%}}
packing: {{method: best_fit, overflow: split, boundaries: {boundaries}, align_tokens: {align_tokens}}}
balance: {{method: rows, model: {{layers: 2, hidden: 32, ffn: 64, heads: 4}}}}
{extra}
"""
    )
    return path
