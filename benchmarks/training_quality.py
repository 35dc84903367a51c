"""Training quality: what the way to shuffle does to a small language model, after a fixed number of steps.

    python benchmarks/training_quality.py [--steps 400] [--seeds 3] [--epochs 1] [--quick]

Real text: modules of the standard library, then licences and readmes of installed packages, then names of Unicode
characters, cut into rows of about 600 bytes and kept in this order, as files sorted by topic are. Every 20th row is
held out for validation. Four orders of the other rows train the same byte-level transformer from the same start, for
the same steps, which are so many epochs of the rows, 1 at most:

    row         all rows permuted
    page        torchmix: permuted pages of 16 rows, windows of twice the buffer's rows, as `shuffle: page` makes them
    streaming   a buffer in file order, 1/20 of the rows, from which random rows leave
    none        file order

It prints validation perplexity per byte, mean over the seeds and each one, as table 3 of the Youmu paper does.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import unicodedata
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.order import SourceOrder

LENGTH = 128
BATCH = 32
ROW_BYTES = 600
ROWS_OF_PAGE = 16
WIDTH, LAYERS, HEADS = 96, 3, 4


def read_topics(topic_bytes: int) -> list[str]:
    """Texts, one topic after the other, each of at most so many bytes."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = [path.read_text(encoding="utf-8", errors="replace") for path in library]
    texts = []
    for distribution in sorted(metadata.distributions(), key=lambda each: each.metadata["Name"] or ""):
        for file in distribution.files or ():
            if file.name.lower().startswith(("license", "metadata", "readme", "copying")):
                path = Path(str(file.locate()))
                texts += [path.read_text(encoding="utf-8", errors="replace")] if path.is_file() else []
    names = [unicodedata.name(chr(i), "") for i in range(sys.maxunicode)]
    return ["\n".join(topic)[:topic_bytes] for topic in (code, texts, [name for name in names if name])]


def read_rows(topic_bytes: int) -> list[bytes]:
    rows = []
    for topic in read_topics(topic_bytes):
        content = topic.encode()
        rows += [content[start : start + ROW_BYTES] for start in range(0, len(content), ROW_BYTES)]
    return rows


def order_of(scheme: str, num_rows: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    buffer_rows = max(1, num_rows // 20)
    if scheme == "row":
        return rng.permutation(num_rows)
    if scheme == "none":
        return np.arange(num_rows)
    if scheme == "page":
        first_row = np.append(np.arange(0, num_rows, ROWS_OF_PAGE), num_rows).astype(np.int64)
        sizes = SourceSizes(
            first_row_of_page=first_row,
            tokens=np.ones(num_rows, np.int32),
            window_pages=max(1, 2 * buffer_rows // ROWS_OF_PAGE),
        )
        source = SourceOrder("text", sizes, seed=seed)
        return np.concatenate([source.window(0, window).rows for window in range(source.num_windows)])
    assert scheme == "streaming"
    buffer, order = list(range(buffer_rows)), []
    for row in range(buffer_rows, num_rows):
        slot = int(rng.integers(buffer_rows))
        order.append(buffer[slot])
        buffer[slot] = row
    return np.array(order + rng.permutation(buffer).tolist())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.ffn(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(257, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 257))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens) + self.places.weight
        return self.head(self.layers(x))


def stream_of(rows: list[bytes], order: NDArray[np.int64], num_tokens: int) -> torch.Tensor:
    """Bytes of the rows in order, 256 after each, `num_tokens` of them."""
    parts, have = [], 0
    for row in order.tolist():
        parts.append(np.append(np.frombuffer(rows[row], np.uint8).astype(np.int64), 256))
        have += len(parts[-1])
        if have >= num_tokens:
            break
    if have < num_tokens:
        raise SystemExit(f"the rows hold {have} tokens, {num_tokens} are asked; fewer --steps")
    return torch.from_numpy(np.concatenate(parts)[:num_tokens])


def loss_of(model: Model, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, 257), batch[:, 1:].reshape(-1))


def perplexity(rows: list[bytes], validation: torch.Tensor, scheme: str, seed: int, steps: int) -> float:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    order = order_of(scheme, len(rows), seed)
    batches = stream_of(rows, order, steps * BATCH * (LENGTH + 1)).view(steps, BATCH, LENGTH + 1)
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        losses = [float(loss_of(model, part)) for part in validation.split(BATCH) if len(part) == BATCH]
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=1.0, help="how much of the rows the steps take")
    parser.add_argument("--quick", action="store_true", help="20 steps, one seed: does it run")
    options = parser.parse_args()
    steps, seeds = (20, 1) if options.quick else (options.steps, options.seeds)
    width = LENGTH + 1
    num_topics, in_training = 3, 0.95 * 0.98  # less the rows held out, and some for topics that fall short
    everything = read_rows(int(steps * BATCH * width / options.epochs / in_training / num_topics))
    training = [row for i, row in enumerate(everything) if i % 20]
    held_out = np.concatenate([np.frombuffer(row, np.uint8) for row in everything[::20]]).astype(np.int64)
    validation = torch.from_numpy(held_out[: len(held_out) // width * width]).view(-1, width)
    used = steps * BATCH * width / sum(len(row) + 1 for row in training)
    print(f"{len(training)} rows for training, {used:.0%} of their bytes used; {len(validation)} samples held out")
    results: list[dict[str, Any]] = []
    print("| shuffle | perplexity | over row | of each seed |\n|---|---|---|---|")
    best = 0.0
    for scheme in ("row", "page", "streaming", "none"):
        values = [perplexity(training, validation, scheme, seed, steps) for seed in range(seeds)]
        mean = sum(values) / seeds
        best = best or mean
        print(f"| {scheme} | {mean:.3f} | {mean - best:+.3f} | {', '.join(f'{v:.3f}' for v in values)} |", flush=True)
        results.append({"scheme": scheme, "perplexity": values})
    print(json.dumps({"benchmark": "training_quality", "steps": steps, "epochs": used, "results": results}))


if __name__ == "__main__":
    main()
