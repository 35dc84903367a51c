"""Training quality: what the way to shuffle does to a small language model after one epoch.

    python benchmarks/training_quality.py [--seeds 3] [--windows 8] [--pages 512 256 64 16] [--quick]

Real text: paragraphs of the standard library's modules, then of Python's help and of licences and readmes of installed
packages, then names of Unicode characters. A row is one paragraph or four names, whole, no row twice; rows keep this
order, as files sorted by topic do. Every 20th row is held out for validation. Each order of the other rows trains the
same byte-level model, a small one without attention, from the same start for the same steps, one epoch; the learning
rate, chosen by what it does to `row`, falls to 0.

    row         all rows permuted
    page        torchmix: pages of 8 rows, as `shuffle: page` shares them out among windows of so many pages
    streaming   a buffer in file order from which random rows leave; as many rows as a window of 256 pages
    none        file order

What decides how well `page` shuffles are ratios: pages of a window (256 is the recipe's default), windows of an epoch,
batches of a window. They are real ones here; rows, pages and batches are small, so that one processor can train it.

It prints validation perplexity per byte. *Over row* is the mean over seeds of the difference to `row` of the same
seed, with its standard error; *spread* is the largest less the smallest of the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import unicodedata
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.order import SourceOrder

LENGTH, BATCH = 128, 24
ROWS_OF_PAGE, WINDOW_PAGES = 8, 256
ROW_BYTES = range(40, 256)
NAMES_OF_ROW = 4
HELD_OUT = 20
CONTEXT, BYTE_WIDTH, WIDTH = 16, 24, 192
LEARNING_RATE = 1.2e-2


def paragraphs(texts: Iterable[str]) -> list[bytes]:
    """Those of a row's size, each once, in order."""
    parts = (part.strip("\n").encode() for text in texts for part in text.split("\n\n"))
    return list(dict.fromkeys(part for part in parts if len(part) in ROW_BYTES))


def read_rows(num_rows: int) -> list[bytes]:
    """Rows of three topics, one after the other: a third each, or more code where the others fall short."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    library = [path for path in sorted(folder.rglob("*.py")) if not {"site-packages", "test"} & set(path.parts)]
    code = paragraphs(path.read_text(encoding="utf-8", errors="replace") for path in library)
    texts = [topics[name] for name in sorted(topics)]
    for distribution in sorted(metadata.distributions(), key=lambda each: each.metadata["Name"] or ""):
        for file in distribution.files or ():
            if file.name.lower().startswith(("license", "metadata", "readme", "copying")):
                path = Path(str(file.locate()))
                texts += [path.read_text(encoding="utf-8", errors="replace")] if path.is_file() else []
    prose = paragraphs(texts)[: num_rows // 3]
    names = [unicodedata.name(chr(i), "") for i in range(sys.maxunicode)]
    names = [name for i, name in enumerate(names) if name and not name.endswith(f"-{i:X}")]  # not ideographs' numbers
    starts = range(0, len(names), NAMES_OF_ROW)
    listed = ["\n".join(names[start : start + NAMES_OF_ROW]).encode() for start in starts][: num_rows // 3]
    rows = code[: num_rows - len(prose) - len(listed)] + prose + listed
    if len(rows) < num_rows:
        raise SystemExit(f"this machine has text for {len(rows)} rows, {num_rows} are asked; fewer --windows")
    return rows


def order_of(scheme: str, num_rows: int, window_pages: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    if scheme == "row":
        return rng.permutation(num_rows)
    if scheme == "none":
        return np.arange(num_rows)
    if scheme == "page":
        first_row = np.append(np.arange(0, num_rows, ROWS_OF_PAGE), num_rows).astype(np.int64)
        tokens = np.ones(num_rows, np.int32)
        sizes = SourceSizes(first_row_of_page=first_row, tokens=tokens, window_pages=window_pages)
        source = SourceOrder("text", sizes, seed=seed)
        return np.concatenate([source.window(0, window).rows for window in range(source.num_windows)])
    assert scheme == "streaming"
    buffer, order = list(range(window_pages * ROWS_OF_PAGE)), []
    for row in range(len(buffer), num_rows):
        slot = int(rng.integers(len(buffer)))
        order.append(buffer[slot])
        buffer[slot] = row
    return np.array(order + rng.permutation(buffer).tolist())


class Model(nn.Module):
    """The next byte from the CONTEXT before it, as in Bengio et al. 2003, with a residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(257, BYTE_WIDTH)
        self.first, self.second = nn.Linear(CONTEXT * BYTE_WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 257)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(self.bytes(tokens), (0, 0, CONTEXT - 1, 0))
        x = torch.relu(self.first(padded.unfold(1, CONTEXT, 1).flatten(2)))
        return self.head(x + torch.relu(self.second(x)))


def samples_of(rows: list[bytes], order: Iterable[int]) -> torch.Tensor:
    """Bytes of the rows in order, 256 after each, cut into samples."""
    stream = np.concatenate([np.append(np.frombuffer(rows[row], np.uint8).astype(np.int64), 256) for row in order])
    width = LENGTH + 1
    return torch.from_numpy(stream[: len(stream) // width * width]).view(-1, width)


def loss_of(model: Model, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, 257), batch[:, 1:].reshape(-1))


def perplexity(batches: list[torch.Tensor], validation: torch.Tensor, seed: int) -> float:
    """Of the held-out samples, after training from the start that the seed gives."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    warm_up, steps = 20, len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        losses = [float(loss_of(model, part)) for part in validation.split(BATCH) if len(part) == BATCH]
    return math.exp(statistics.mean(losses))


def print_ratios(num_rows: int, steps: int) -> None:
    window_rows = ROWS_OF_PAGE * WINDOW_PAGES
    print(f"{num_rows} rows, {steps} steps of {num_rows / steps:.0f} rows, an epoch; the default window has")
    print(f"{WINDOW_PAGES} pages = {window_rows} rows = {window_rows / num_rows:.2f} epochs", end=" ")
    print(f"= {window_rows * steps / num_rows:.0f} batches\n")


def print_table(found: dict[str, list[float]]) -> None:
    print("\n| shuffle | perplexity | over row | spread | of each seed |\n|---|---|---|---|---|")
    for name, values in found.items():
        over = [value - row for value, row in zip(values, found["row"], strict=True)]
        error = statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else math.nan
        print(
            f"| {name} | {statistics.mean(values):.3f} | {statistics.mean(over):+.3f} +- {error:.3f} "
            f"| {max(values) - min(values):.3f} | {', '.join(f'{value:.3f}' for value in values)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=8, help="windows of 256 pages in an epoch")
    parser.add_argument("--pages", type=int, nargs="+", default=[512, 256, 64, 16], help="of a window of `page`")
    parser.add_argument("--quick", action="store_true", help="one window, one seed: does it run")
    options = parser.parse_args()
    windows, seeds = (1, 1) if options.quick else (options.windows, options.seeds)
    torch.set_num_threads(1)
    num_rows = windows * WINDOW_PAGES * ROWS_OF_PAGE
    everything = read_rows(-(-num_rows * HELD_OUT // (HELD_OUT - 1)))
    training = [row for i, row in enumerate(everything) if i % HELD_OUT][:num_rows]
    held_out = everything[::HELD_OUT]
    validation = samples_of(held_out, range(len(held_out)))
    pages = [("page", pages) for pages in options.pages]
    schemes = [("row", 0), *pages, ("streaming", WINDOW_PAGES), ("none", 0)]
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        for scheme, window_pages in schemes:
            order = order_of(scheme, len(training), window_pages, seed)
            batches = list(samples_of(training, order.tolist()).split(BATCH))[:-1]
            if not found:
                print_ratios(len(training), len(batches))
            name = f"page, {window_pages} pages a window" if scheme == "page" else scheme
            found.setdefault(name, []).append(perplexity(batches, validation, seed))
            print(f"seed {seed}, {name}: {found[name][-1]:.4f}", flush=True)
    print_table(found)
    print(json.dumps({"benchmark": "training_quality", "rows": len(training), "found": found}))


if __name__ == "__main__":
    main()
