"""Images and text: how evenly encoders work, and what crosses the network, by simulation on sizes alone.

    python benchmarks/images.py [--ranks 8 64 288 1152] [--steps 3]

Four ways to place the images of a step, on the same samples:

    none         each rank encodes the images of its own samples
    rebalanced   after loading: LPT over all ranks on the squares of patches, as VeOmni does; pixels travel to the
                 encoder in bfloat16, and embeddings back
    lpt          before reading: LPT over all ranks on the cost of the encoder, wherever the text is
    torchmix     before reading: LPT near the text on the cost of the encoder; pixels go from the disk to the encoder

A last table has the share of the rows that travel to another rank, by the tolerance of `near_text`, and in how many
steps the items could not stay near their text, or hash order was taken.

The distributions are generators. Nobody has published percentiles of such sets, so their parameters are assumptions,
and are printed. The cost of an image is that of the encoder's floating-point operations; seconds divide them by
--tflops, an assumption too. Embeddings travel forward and their gradients back, in 2 bytes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.modalities.images.rules import DynamicRule
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import encoder_cost, in_hash_order
from torchmix.planner.graph.items import ItemBalance, place_items
from torchmix.planner.methods import lpt
from torchmix.planner.plan import ItemPlan, Items
from torchmix.recipe.structs import EncoderModel

LENGTH = 8192
SAMPLES_OF_RANK = 4
WIDTH_OUT = 3584
RULE = DynamicRule(patch=14, merge=2, min_pixels=3_136, max_pixels=12_845_056)
QWEN_2_5 = EncoderModel(
    layers=32,
    hidden=1280,
    ffn=3420,
    mlp="swiglu",
    heads=16,
    patch=14,
    window=112,
    full_layers=(7, 15, 23, 31),
    merge=2,
    out=WIDTH_OUT,
)
PIXEL_BYTES = 2 * 3 * 14 * 14 * 2
"""A patch in bfloat16, with its frame doubled in time, takes these bytes: so Hugging Face's processor gives it."""


@dataclass(frozen=True)
class Documents:
    """A generator of documents: images and tokens of text. Sides are log-normal around a median."""

    name: str
    share: float
    """Of documents."""
    images: float
    """Mean of a geometric number, at least 1 where above 0."""
    side: float
    """Median of the shorter side, in pixels."""
    spread: float
    """Sigma of its logarithm."""
    ratio: float
    """Sigma of the logarithm of the ratio of sides."""
    text: float
    """Median tokens of text, log-normal with sigma 0.8."""


TOLERANCES = (0.02, 0.05, 0.1, 0.2)
WAYS = ("none", "rebalanced", "lpt", "torchmix")
SETS = {
    "captions": [Documents("captions", 0.8, 1, 520, 0.35, 0.25, 17), Documents("text", 0.2, 0, 0, 0, 0, 900)],
    "ocr": [
        Documents("pages", 0.4, 1, 1240, 0.25, 0.12, 700),
        Documents("crops", 0.4, 1, 260, 0.6, 0.7, 40),
        Documents("text", 0.2, 0, 0, 0, 0, 900),
    ],
    "icons": [Documents("icons", 0.8, 8, 140, 0.3, 0.2, 120), Documents("text", 0.2, 0, 0, 0, 0, 900)],
    "interleaved": [
        Documents("articles", 0.7, 2.5, 480, 0.6, 0.3, 815),
        Documents("pages", 0.05, 1, 1240, 0.25, 0.12, 700),
        Documents("text", 0.25, 0, 0, 0, 0, 900),
    ],
}


def make_images(kinds: list[Documents], rng: np.random.Generator, num_samples: int) -> tuple[Int64Array, Int64Array]:
    """Sample and patches of each image of a step; samples are filled in turn with documents in random order."""
    sample, patches = [], []
    shares = np.array([kind.share for kind in kinds])
    number, used = 0, 0
    while number < num_samples:
        chosen = rng.choice(len(kinds), 4096, p=shares / shares.sum())
        for which in chosen.tolist():
            kind = kinds[which]
            count = 0 if not kind.images else 1 + int(rng.geometric(1 / kind.images) - 1)
            side = np.maximum(28, rng.lognormal(np.log(max(kind.side, 1)), kind.spread, count))
            ratio = np.exp(np.abs(rng.normal(0, kind.ratio, count)))
            sizes = RULE.sizes(np.minimum(side * ratio, 5000).astype(np.int64), np.minimum(side, 5000).astype(np.int64))
            tokens = int(sizes.tokens.sum() + rng.lognormal(np.log(kind.text), 0.8))
            if used and used + tokens > LENGTH:
                number, used = number + 1, 0
                if number == num_samples:
                    break
            if sizes.tokens.sum() > LENGTH:
                continue  # a document longer than a sample is left out
            used += tokens
            sample += [number] * count
            patches += sizes.patches.tolist()
    return np.array(sample, np.int64), np.array(patches, np.int64)


def near_text(sample: Int64Array, patches: Int64Array, ranks: int, near: float) -> ItemPlan:
    """Where the planner has the images of a step encoded."""
    zeros = np.zeros(len(sample), np.int64)
    items = Items(
        piece=zeros, item=zeros, sample=sample, offset=zeros, tokens=patches // 4, size=patches, segments=zeros + 1
    )
    layout, cost = Layout(dp=ranks), encoder_cost(QWEN_2_5)(patches)
    texts = in_hash_order(ranks * SAMPLES_OF_RANK, layout)
    return place_items(items, cost, zeros, texts, layout, ItemBalance(axis="WORLD", near_text=near), unit="image")


def traffic(kinds: list[Documents], ranks: int, steps: int, near: float) -> tuple[float, int]:
    """Share of the rows that travel, and steps that fell back, with a tolerance."""
    away = rows = fell_back = 0
    for seed in range(steps):
        sample, patches = make_images(kinds, np.random.default_rng(seed), ranks * SAMPLES_OF_RANK)
        plan = near_text(sample, patches, ranks, near)
        away += int(patches[plan.consumer_of_item != sample % ranks].sum())
        rows += int(patches.sum())
        fell_back += plan.balance.left_text or plan.balance.took_hash_order
    return away / rows, fell_back


def measure(kinds: list[Documents], ranks: int, seed: int, near: float, tflops: float) -> list[tuple[str, list[float]]]:
    """For each way: slowest over mean, seconds lost, GB of pixels, GB of embeddings, ms to place."""
    rng = np.random.default_rng(seed)
    sample, patches = make_images(kinds, rng, ranks * SAMPLES_OF_RANK)
    home = sample % ranks
    model = encoder_cost(QWEN_2_5)
    cost = model(patches)
    flops = cost.astype(np.float64) * 2 * QWEN_2_5.hidden * 3  # costs are over 2 d; a backward is twice a forward
    found = []
    for name in WAYS:
        began = time.process_time()
        if name == "none":
            rank = home
        elif name == "rebalanced":
            rank = lpt(patches**2, ranks)
        elif name == "lpt":
            rank = lpt(cost, ranks)
        else:
            rank = near_text(sample, patches, ranks, near).consumer_of_item
        placed_s = time.process_time() - began
        load = np.bincount(rank, flops, ranks)
        moved = patches[rank != home].sum()
        found.append(
            (
                name,
                [
                    load.max() / load.mean(),
                    (load.max() - load.mean()) / (tflops * 1e12),
                    moved * PIXEL_BYTES / 1e9 if name == "rebalanced" else 0.0,
                    moved / 4 * WIDTH_OUT * 2 * 2 / 1e9,
                    1000 * placed_s,
                ],
            )
        )
    return found


def _worst(ways: NDArray[np.float64]) -> str:
    return f"{ways[:, 0].max():.3f}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 288, 1152])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--near", type=float, default=0.04)
    parser.add_argument("--tflops", type=float, default=300.0, help="assumed speed of a rank")
    asked = parser.parse_args()
    print(f"samples of {LENGTH} tokens, {SAMPLES_OF_RANK} a rank and step; {asked.steps} steps; encoder {QWEN_2_5}")
    for name, kinds in SETS.items():
        print(f"{name}: {kinds}")
    means = {
        (name, ranks): np.mean(
            [[way[1] for way in measure(kinds, ranks, seed, asked.near, asked.tflops)] for seed in range(asked.steps)],
            axis=0,
        )
        for name, kinds in SETS.items()
        for ranks in asked.ranks
    }
    print("\n| set | ranks | way | slowest / mean | seconds lost | pixels GB | embeddings GB | CPU ms to place |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, ranks), ways in means.items():
        for way, mean in zip(WAYS, ways, strict=True):
            cells = f"{mean[0]:.3f} | {mean[1]:.3f} | {mean[2]:.2f} | {mean[3]:.2f} | {mean[4]:.1f}"
            print(f"| {name} | {ranks} | {way} | {cells} |")
    none, rebalanced, plain, ours = (np.array([ways[way] for ways in means.values()]) for way in range(len(WAYS)))
    print("\n| goal | limit | worst of all sets and ranks | of the same without balance | after loading |")
    print("|---|---|---|---|---|")
    print(f"| slowest encoder rank over the mean | 1.05 | {_worst(ours)} | {_worst(none)} | {_worst(rebalanced)} |")
    rows = [(way[:, 3] / np.maximum(plain[:, 3], 1e-9)).max() for way in (ours, none, rebalanced)]
    print(f"| embedding bytes over those of plain LPT | 0.6 | {rows[0]:.2f} | {rows[1]:.2f} | {rows[2]:.2f} |")
    print(f"| times that pixels cross the network | 1 | 0 | 0 | {1 if rebalanced[:, 2].any() else 0} |")
    print(f"\n| set | ranks | {' | '.join(f'{near:.0%}' for near in TOLERANCES)} | steps that fell back |")
    print("|---|---|" + "---|" * (len(TOLERANCES) + 1))
    for name, kinds in SETS.items():
        for ranks in asked.ranks:
            found = [traffic(kinds, ranks, asked.steps, near) for near in TOLERANCES]
            shares = " | ".join(f"{100 * share:.0f} %" for share, _ in found)
            print(f"| {name} | {ranks} | {shares} | {sum(count for _, count in found)} of {len(found) * asked.steps} |")


if __name__ == "__main__":
    main()
