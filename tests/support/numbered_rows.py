"""A recipe whose tokens tell their document: row r of a source that begins at f is the token f + r, again and again.

In: a folder. Out: files, the recipe, its catalog; and what a loader has delivered, by step. The first source's rows
have ids, the other's have none.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.selections import write_rows
from torchmix.constructor.fields import Microbatch
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

FIRST = {"web": 0, "code": 10_000, "late": 20_000}
"""Number of the first row of each source."""
ROWS = 600
LENGTH = 64
Document = tuple[str, int]
"""Source and row."""


def write_numbered(folder: Path, mixture: str, *, sources: str = "web code", extra: str = "") -> Path:
    """The recipe over the files, which are made at the first call; indexed."""
    for name, first in FIRST.items():
        if not (folder / f"{name}.parquet").exists():
            write_rows(folder / f"{name}.parquet", first, ROWS)
    lines = "".join(
        f"  {name}: {{path: {name}.parquet, tokens: ids{', id: url' if name == 'web' else ''}}}\n"
        for name in sources.split()
    )
    path = folder / "recipe.yaml"
    path.write_text(
        f"version: 1\nseed: 3\nbatch: {{samples: 8, length: {LENGTH}}}\nsources:\n{lines}mixture: {mixture}\n"
        f"packing: {{align_tokens: 1}}\nshuffle: {{window_pages: 4}}\n{extra}\n",
        encoding="utf-8",
    )
    index_recipe(load_recipe(path), folder)
    return path


def delivered(microbatches: list[Microbatch]) -> dict[int, Counter[Document]]:
    """Tokens of each document in each step, from the tensors."""
    found: dict[int, Counter[Document]] = {}
    for microbatch in microbatches:
        assert microbatch.tokens is not None and microbatch.source_index is not None
        numbers = microbatch.tokens[microbatch.source_index >= 0].tolist()
        found.setdefault(microbatch.step, Counter()).update(map(document_of, numbers))
    return found


def document_of(token: int) -> Document:
    """The document that a token is of."""
    name = max((name for name, first in FIRST.items() if first <= token), key=FIRST.__getitem__)
    return name, token - FIRST[name]


def traced(pieces: list[dict[str, Any]]) -> dict[int, Counter[Document]]:
    """Tokens of each document in each step, from pieces that `trace` found."""
    found: dict[int, Counter[Document]] = {}
    for piece in pieces:
        counts = found.setdefault(piece["step"], Counter())
        counts[(piece["source"], piece["row"])] += piece["stop"] - piece["start"]
    return found
