"""Layouts, and Megatron's arguments for them.

In: nothing. Out: `LAYOUTS`, `PACKINGS`, and the arguments of a run. Must hold: all runs have the same model, sizes and
learning rates; only the layout differs. Losses are sums over tokens, divided once by the tokens of the global batch
(`--calculate-per-token-loss`), so that they do not depend on which rank had which sample. Cost: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corpus import LENGTH, SAMPLES

STEPS = 6
SAVE_AT = 3
LAYERS = 4
MICRO_BATCH_OF_PACKING = {"dense": 2, "thd": 1}
"""Samples. Packed ones are one row, for which Megatron's pipeline stages have no shape if there are several."""
PACKINGS = tuple(MICRO_BATCH_OF_PACKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the ranks of a run share the model."""

    name: str
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    chunks: int = 1
    """Virtual stages of each pipeline stage."""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def arguments(self) -> list[str]:
        """Megatron's flags; data-parallel ranks are what the others leave over."""
        sizes = {"tensor-model": self.tp, "context": self.cp, "pipeline-model": self.pp}
        given = [text for name, size in sizes.items() if size > 1 for text in (f"--{name}-parallel-size", str(size))]
        virtual = ["--num-layers-per-virtual-pipeline-stage", str(LAYERS // (self.pp * self.chunks))]
        return [*given, *(virtual if self.chunks > 1 else [])]


SINGLE = Layout(name="DP1")
LAYOUTS = (
    Layout(name="DP2", dp=2),
    Layout(name="TP2", tp=2),
    Layout(name="CP2", cp=2),
    Layout(name="PP2", pp=2),
    Layout(name="PP2 x VPP2", pp=2, chunks=2),
    Layout(name="TP2 x PP2", tp=2, pp=2),
)
LAYOUT_OF_NAME = {layout.name: layout for layout in (SINGLE, *LAYOUTS)}


def steps_flags(steps: int) -> list[str]:
    """How long a run is, those before a checkpoint included, and how many samples each step has."""
    return ["--train-iters", str(steps), "--lr-decay-iters", str(STEPS), "--global-batch-size", str(SAMPLES)]


def training_arguments(
    layout: Layout, recipe: Path, *, packing: str, schedule: Sequence[str] | None = None
) -> list[str]:
    """Megatron's arguments of a run.

    Args:
        layout: The layout of its ranks.
        recipe: The recipe's file.
        packing: One of `PACKINGS`.
        schedule: Flags that say how long the run is, and how many samples each step has; `steps_flags(STEPS)` if not
            given.
    """
    shared = f"""
        --data-recipe {recipe} --tokenizer-type NullTokenizer --vocab-size 511 --num-workers 0
        --num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --position-embedding-type learned_absolute
        --seq-length {LENGTH} --max-position-embeddings {LENGTH} --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {MICRO_BATCH_OF_PACKING[packing]} --calculate-per-token-loss
        --lr 1e-3 --min-lr 1e-4 --clip-grad 1.0
        --eval-iters 0 --eval-interval 1000 --log-interval 1 --ckpt-format torch_dist
    """
    return [*shared.split(), *(schedule or steps_flags(STEPS)), *layout.arguments]
