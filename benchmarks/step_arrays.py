"""A step's arrays: what it costs to fill them, to cut them for a role, to expand them for the model; and their bytes.

    python benchmarks/step_arrays.py [--samples 64] [--length 8192] [--rounds 30] [--quick]

One replica's step of `best_fit` with documents, on one core, with memory that is used again: the fastest of `--rounds`.
Pieces are of 800 and of 60 tokens on average, in 32-bit ids, as the reader gives them.

  build    the arrays that a leader keeps, in ns a token of the replica
  share    the part of a role under cp 2, in ns a token of the rank
  expand   all that a trainer can ask of its microbatches, in ns a token of the rank
  kept     bytes a token that a leader keeps of each step
  sent     bytes a token of the rank that travel to an only, first and last stage
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from torchmix.constructor.arrays import StepMemory
from torchmix.constructor.build import BlockPieces, build
from torchmix.constructor.fields import StepTensors, batch_of_role, cp_slices
from torchmix.parallel.place_tree import Role
from torchmix.recipe.structs import Packing

ALIGN_TOKENS = 8
EXPANDED = ("tokens", "labels", "loss_mask", "position_ids", "source_index")


def pieces_of_mean(mean_tokens: int, *, samples: int, length: int, sources: int = 306) -> BlockPieces:
    """Pieces of geometric lengths in samples that are nearly full."""
    rng = np.random.default_rng(mean_tokens)
    columns: list[tuple[int, int, int]] = []
    for sample in range(samples):
        offset = 0
        while offset < length - ALIGN_TOKENS:
            tokens = int(min(rng.geometric(1 / mean_tokens), length - offset))
            columns.append((sample, offset, tokens))
            offset += -(-tokens // ALIGN_TOKENS) * ALIGN_TOKENS
    sample, offset, tokens = (np.array(column) for column in zip(*columns, strict=True))
    return BlockPieces(
        steps=(0,),
        num_tokens_global=(int(tokens.sum()),),
        num_samples=samples,
        micro_batch_size=1,
        sample=sample,
        sample_offset=offset,
        source=rng.integers(0, sources, len(tokens)).astype(np.int32),
        row=np.arange(len(tokens)),
        start=np.zeros(len(tokens), np.int64),
        tokens=tokens,
        epoch=np.zeros_like(tokens),
        ends_document=rng.random(len(tokens)) < 0.9,
    )


ROWS = {
    "build_ns": "fill, ns",
    "share_ns": "cut for a rank of cp 2, ns",
    "expand_ns": "expand all five tensors on the CPU, ns",
    "expand_cp2_ns": "the same for a rank of cp 2, ns",
    "kept_bytes": "kept and shared, bytes",
    "sent_first_bytes": "sent to a first stage, bytes",
    "sent_last_bytes": "sent to a last stage, bytes",
}
"""Rows of the table."""


def fastest_ns(work: Callable[[], object], *, rounds: int, num_tokens: int) -> float:
    """Nanoseconds a token of the fastest round."""
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        held = work()
        seconds.append(time.process_time() - began)
        del held
    return round(min(seconds) / num_tokens * 1e9, 2)


def expand(step: StepTensors) -> None:
    """All fields of one microbatch after another, as a trainer that lets each go."""
    microbatches = step.microbatches()
    while microbatches:
        microbatch = microbatches.pop()
        for name in EXPANDED:
            getattr(microbatch, name)


def measure(mean_tokens: int, *, samples: int, length: int, rounds: int) -> dict[str, float]:
    packing = Packing(method="best_fit", boundaries="document", align_tokens=ALIGN_TOKENS)
    pieces = pieces_of_mean(mean_tokens, samples=samples, length=length)
    num_tokens = samples * length
    values = np.random.default_rng(0).integers(0, 128_000, num_tokens).astype(np.int32)
    successors = np.ones(len(pieces.tokens), np.int64)
    memory, shares = StepMemory(), StepMemory()

    def built() -> StepTensors:
        arrays = build(pieces, values, successors, length=length, packing=packing, memory=memory)
        return StepTensors.from_arrays(arrays)

    step = built()
    slices = cp_slices(step, 2, length=length, packing=packing)
    whole = cp_slices(step, 1, length=length, packing=packing)
    role = Role(stage="only", cp_rank=1)

    def shared() -> StepTensors:
        return batch_of_role(step, role, cp_slices(step, 2, length=length, packing=packing), memory=shares)

    share = batch_of_role(step, role, slices)
    found: dict[str, float] = {
        "mean_tokens": mean_tokens,
        "build_ns": fastest_ns(built, rounds=rounds, num_tokens=num_tokens),
        "share_ns": fastest_ns(shared, rounds=rounds, num_tokens=num_tokens // 2),
        "expand_ns": fastest_ns(lambda: expand(step), rounds=rounds, num_tokens=num_tokens),
        "expand_cp2_ns": fastest_ns(lambda: expand(share), rounds=rounds, num_tokens=num_tokens // 2),
        "kept_bytes": round(num_bytes(step) / num_tokens, 2),
    }
    for stage in ("only", "first", "last"):
        sent = batch_of_role(step, Role(stage=stage, cp_rank=0), whole)
        found[f"sent_{stage}_bytes"] = round(num_bytes(sent) / num_tokens, 2)
    return found


def num_bytes(step: StepTensors) -> int:
    return sum(tensor.nbytes for tensor in step.to_tensors().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="a small step, to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.samples, args.length, args.rounds = 4, 1024, 2
    torch.set_num_threads(1)
    means = (800, 60)
    found = [measure(mean, samples=args.samples, length=args.length, rounds=args.rounds) for mean in means]
    print(f"CPU, ns a token; bytes a token | {' | '.join(f'pieces of {mean} tokens' for mean in means)}")
    for key, title in ROWS.items():
        print(f"{title} | {' | '.join(str(row[key]) for row in found)}")
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
