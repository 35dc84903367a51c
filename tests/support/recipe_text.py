"""A recipe that uses every key of version 1, as text and as a file; and a small one, as Structs."""

from __future__ import annotations

from pathlib import Path

from torchmix.recipe.load import load_recipe
from torchmix.recipe.structs import Batch, Recipe, Source

TEXT = """\
version: 1
seed: 1234
batch: {samples: 64, length: 1024}
catalog: ./index
sources:
  peps:
    path: ../corpus/peps.parquet
    text: body
    tokenizer: bytes
  web:
    path: [data/web/*.parquet, data/more.parquet]
    tokens: input_ids
    max_epochs: 4
    on_exhausted: renormalise
mixture: {web: 70%, peps: 30%}
packing: {method: best_fit, overflow: split, boundaries: document, align_tokens: 8}
balance: {method: rows, model: {layers: 32, hidden: 4096, ffn: 11008, heads: 32, kv_heads: 8}}
shuffle: {window_pages: 256, window_bytes: 64MiB}
read: {cache: 1GiB}
"""


def load_text(folder: Path, text: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def edited(old: str, new: str) -> str:
    assert TEXT.count(old) == 1, f"{old!r} does not stand once in the text"
    return TEXT.replace(old, new)


def small_recipe(**changes: object) -> Recipe:
    fields: dict[str, object] = {
        "version": 1,
        "seed": 0,
        "batch": Batch(samples=4, length=64),
        "sources": {"a": Source(path="a.parquet", tokens="ids"), "b": Source(path="b.parquet", tokens="ids")},
        "mixture": {"a": "25%", "b": "75%"},
    }
    return Recipe(**(fields | changes))  # type: ignore[arg-type]
